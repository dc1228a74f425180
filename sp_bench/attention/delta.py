"""The gated delta rule over the ranks of a sequence: all-to-alls of heads, or states that pass from rank to rank.

Each rank holds n = S/P tokens in order. B batch, H value heads, Hk heads of queries and keys, D and E sizes of a key
and of a value head. A state is [B,H,D,E] in fp32 (fp64).

The state after a rank's tokens is affine in the one before them: final = M state + U, with M [B,H,D,D]. So is each
output: out = out(0) + C state, C [B,n,H,D]. One call of the kernel computes all four: to the values come D more, which
are 0, and whose state begins as the identity. Its results for these are C and M. Source of passing (M, U): arXiv
2404.02882 for linear attention, and flash-linear-attention's context parallelism for this rule.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sp_bench.attention.borders import in_layout
from sp_bench.attention.exchange import Collectives
from sp_bench.attention.head_exchange import by_rank, exchange_heads
from sp_bench.attention.merge import wide_dtype
from sp_bench.attention.no_kernel import NoKernel
from sp_bench.kernels import DeltaKernel
from sp_bench.measure import ledger

# q, k, v, g, beta and the state before, or None -> out, and the state after
Rule = Callable[..., tuple[Tensor, Tensor]]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, g, beta -> out


class _Counted(torch.autograd.Function):
    """A kernel's forward and backward as one call each, which the active ledger sees."""

    @staticmethod
    def forward(ctx, kernel: DeltaKernel, scale: float, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:  # pyright: ignore
        ctx.leaves = [x if x is None else x.detach().requires_grad_() for x in inputs]
        q, k, v, g, beta, state = cast(list[Any], ctx.leaves)
        with torch.enable_grad(), ledger.delta_call("forward", q, k, v):
            ctx.results = kernel.attend(q, k, v, g, beta, state, scale=scale)
        out, state = ctx.results
        return out.detach(), state.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        leaves: list[Tensor | None] = ctx.leaves
        (q, k, v, *_), known = cast(list[Tensor], leaves), [x for x in leaves if x is not None]
        with ledger.delta_call("backward", q, k, v):
            found = iter(torch.autograd.grad(ctx.results, known, (dout, dstate)))
        del ctx.results, ctx.leaves  # of this layer alone; the function lives until the whole backward has ended
        return None, None, *(x if x is None else next(found) for x in leaves)


class _Nothing(torch.autograd.Function):
    """What stands in for a kernel in a step of messages alone: tensors of the right shapes."""

    @staticmethod
    def forward(ctx, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:  # pyright: ignore
        ctx.inputs = inputs
        q, _, v, *_ = cast(tuple[Tensor, ...], inputs)
        state = q.new_empty(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=wide_dtype(q))
        return torch.empty_like(v), state

    @staticmethod
    def backward(ctx, dout: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return tuple(x if x is None else torch.empty_like(x) for x in ctx.inputs)


def rule(kernel: Any, scale: float) -> Rule:
    """The kernel as a differentiable function."""
    if isinstance(kernel, NoKernel):
        return cast(Rule, _Nothing.apply)
    return partial(cast(Rule, _Counted.apply), kernel, scale)


# -- heads --


class _ToHeads(torch.autograd.Function):
    """Tensors by tokens, [B,n,P*h,.] each and of one dtype -> by heads, [B,S,h,.]."""

    @staticmethod
    def forward(ctx, transport: Collectives, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        ctx.transport = transport
        by_heads, _ = exchange_heads([by_rank(x, transport.group.size()) for x in tensors], [], transport).arrive()
        return tuple(x.contiguous() for x in by_heads)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        _, by_tokens = exchange_heads([], gradients, ctx.transport).arrive()
        return None, *(x.flatten(2, 3) for x in by_tokens)


class _ToTokens(torch.autograd.Function):
    """A tensor by heads, [B,S,h,.] -> by tokens, [B,n,P*h,.]."""

    @staticmethod
    def forward(ctx, transport: Collectives, by_heads: Tensor) -> Tensor:  # pyright: ignore
        ctx.transport = transport
        _, (by_tokens,) = exchange_heads([], [by_heads], transport).arrive()
        return by_tokens.flatten(2, 3)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:  # pyright: ignore
        (by_heads,), _ = exchange_heads([by_rank(gradient, ctx.transport.group.size())], [], ctx.transport).arrive()
        return None, by_heads.contiguous()


def by_heads(rule: Rule, transport: Collectives) -> Attend:
    """Each rank computes all tokens of its heads: q, k, v and beta travel in one message, g, which is wide, in another,
    and the output in a third."""

    def attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, beta = cast(Any, _ToHeads.apply(transport, q, k, v, beta.unsqueeze(-1)))
        (g,) = cast(Any, _ToHeads.apply(transport, g.unsqueeze(-1)))
        out, _ = rule(q, k, v, g.squeeze(-1), beta.squeeze(-1), None)
        return cast(Tensor, _ToTokens.apply(transport, out))

    return attend


# -- states --


class _Gathered(torch.autograd.Function):
    """U and M of this rank, [B,H,D,E+D] -> the state before its tokens, of those of all ranks before."""

    @staticmethod
    def forward(ctx, transport: Collectives, own: Tensor, value_dim: int) -> Tensor:  # pyright: ignore
        of_all = transport.all_gather(own.contiguous().unsqueeze(0)).wait()  # [P,B,H,D,E+D]
        states = [torch.zeros_like(own[..., :value_dim])]
        for each in of_all[: transport.group.rank()]:
            states.append(each[..., value_dim:] @ states[-1] + each[..., :value_dim])
        ctx.transport, ctx.value_dim = transport, value_dim
        ctx.save_for_backward(of_all, *states[:-1])
        return states[-1]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor, None]:  # pyright: ignore
        of_all, *states = ctx.saved_tensors
        found = torch.zeros_like(of_all)
        for place, state in reversed([*enumerate(states)]):
            found[place, ..., : ctx.value_dim] = gradient
            found[place, ..., ctx.value_dim :] = gradient @ state.transpose(-1, -2)
            gradient = of_all[place, ..., ctx.value_dim :].transpose(-1, -2) @ gradient
        return None, ctx.transport.reduce_scatter(found).wait().squeeze(0), None


class _Handed(torch.autograd.Function):
    """U and M of this rank -> the state before its tokens, which the rank before hands on; in the backward the rank
    behind hands on its gradient."""

    @staticmethod
    def forward(ctx, transport: Collectives, update: Tensor, transition: Tensor) -> Tensor:  # pyright: ignore
        state = _from_neighbour(transport, -1, update)
        _to_neighbour(transport, 1, transition @ state + update)
        ctx.transport = transport
        ctx.save_for_backward(state, transition)
        return state

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor, Tensor]:  # pyright: ignore
        state, transition = ctx.saved_tensors
        after = _from_neighbour(ctx.transport, 1, gradient)  # of the state that this rank handed on
        _to_neighbour(ctx.transport, -1, gradient + transition.transpose(-1, -2) @ after)
        return None, after, after @ state.transpose(-1, -2)


def _from_neighbour(transport: Collectives, offset: int, like: Tensor) -> Tensor:
    """What the rank `offset` from this one hands on; 0 where there is none."""
    received, neighbour = torch.zeros_like(like), transport.group.rank() + offset
    if 0 <= neighbour < transport.group.size():
        transport.between({}, {neighbour: received}).wait_all()
    return received


def _to_neighbour(transport: Collectives, offset: int, tensor: Tensor) -> None:
    neighbour = transport.group.rank() + offset
    if 0 <= neighbour < transport.group.size():
        transport.between({neighbour: tensor.contiguous()}, {}).wait_all()


def by_states(rule: Rule, transport: Collectives, variant: str) -> Attend:
    """Each rank computes its own tokens, and adds what the state before them makes of each output."""

    def attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        dim, value_dim = k.shape[-1], v.shape[-1]
        zeros = v.new_zeros(*v.shape[:-1], dim)
        identity = torch.eye(dim, value_dim + dim, dtype=wide_dtype(v), device=v.device).roll(value_dim, dims=-1)
        both, final = rule(
            q, k, torch.cat([v, zeros], dim=-1), g, beta, identity.expand(v.shape[0], v.shape[2], -1, -1)
        )
        out, of_state = both.split([value_dim, dim], dim=-1)
        if variant == "chain":
            state = _Handed.apply(transport, *final.split([value_dim, dim], dim=-1))
        else:
            state = _Gathered.apply(transport, final, value_dim)
        # the state is rounded, as it is inside of a kernel before it multiplies
        return out + torch.einsum("bnhd,bhde->bnhe", of_state, cast(Tensor, state).to(of_state.dtype))

    return attend


def converted(attend: Attend, group: dist.ProcessGroup) -> Attend:
    """`attend`, which computes contiguous tokens, for tokens in zigzag order: q, k, v and beta travel in one message,
    g, which is wide, in another, and the output back in a third."""

    def converting(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, beta = in_layout((q, k, v, beta), "zigzag", "contiguous", group)
        (g,) = in_layout((g,), "zigzag", "contiguous", group)
        return in_layout((attend(q, k, v, g, beta),), "contiguous", "zigzag", group)[0]

    return converting
