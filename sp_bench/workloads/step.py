"""One step of attention alone, on inputs that each rank draws for itself.

B batch, s local tokens, H heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sp_bench.config.shape import AttentionShape
from sp_bench.measure import ledger
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import SequenceParallelAttention
from sp_bench.oracle import delta


def local_inputs(shape: AttentionShape, local_len: int, device: torch.device, seed: int) -> list[Tensor]:
    """This rank's inputs (`AttentionShape.sizes`), in the shape's dtype. They are drawn on the device and for this rank
    alone, because no rank has room for the whole sequence at the timed length. All have the same up-projections."""
    options = {"device": device, "dtype": getattr(torch, shape.dtype)}
    sizes, generator = shape.sizes(local_len), torch.Generator(device).manual_seed(seed)
    drawn = [torch.randn(size, generator=generator, **options) for size in sizes]
    if shape.gated_delta:
        return delta.tame(drawn, shape.seq_len)
    if shape.kv_lora_rank is not None:
        drawn[2] = torch.randn(sizes[2], generator=generator.manual_seed(0), **options) * shape.kv_lora_rank**-0.5
    return drawn


def three_sets(shape: AttentionShape, local_len: int, device: torch.device, seed: int) -> list[list[Tensor]]:
    """Three sets of inputs as `local_inputs` draws them. Each begins a token behind the one before in the same memory:
    its tensors lie elsewhere, and take no memory of their own but for that token. They share the up-projections."""
    wider = replace(shape, batch_size=1)
    drawn = local_inputs(wider, shape.batch_size * local_len + 2, device, seed)
    sizes = shape.sizes(local_len)
    return [
        [
            x if x.shape == size else x[:, start : x.shape[1] - 2 + start].view(size)
            for x, size in zip(drawn, sizes, strict=True)
        ]
        for start in range(3)
    ]


def attention_step(
    inputs: Sequence[Tensor],
    attention: SequenceParallelAttention,
    *,
    backward: bool = True,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """This rank's output, or with `backward` its output and the gradients of what it read: `inputs` without the last,
    which is dout. The gradient of the `sinks` [Hq] is computed, too.

    Raises:
        Incorrect: a result is of a kind that is computed when it is first read, and no clock would see that.
    """
    *read, dout = inputs
    attend = attention.with_sinks(sinks).attend
    if not backward:
        with torch.no_grad():
            return _computed([attend(*read)])
    leaves = [x.detach().requires_grad_() for x in read]
    out = attend(*leaves)
    with ledger.phase("backward"):
        return _computed([out.detach(), *torch.autograd.grad(out, leaves, dout)])


def _computed(results: list[Tensor]) -> list[Tensor]:
    for x in results:
        if type(x) is not Tensor:
            raise Incorrect(
                f"the method returns a {type(x).__name__}, which may be computed later than the step ends; let it "
                "return a torch.Tensor, of functional collectives that of wait_tensor"
            )
    return results
