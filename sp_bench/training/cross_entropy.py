"""The loss of a language model: from whole logits, or from one tile of them at a time.

N local tokens, h hidden size, V vocabulary. For a long sequence the logits take more memory than all else that a step
keeps: in bf16 with an fp32 softmax about 12 bytes x N x V, gradients included. Tiles of t tokens take that for t tokens
instead of N, and in addition the gradient of the output matrix in fp32, once. With `with_gradient` compiled the 12
bytes are 4: logits and their gradient, both in bf16.

The loss comes last in the forward. So the gradients of a tile are computed at once, while its logits exist: nothing is
computed twice, and the FLOPs are the same as with whole logits. Source: the fused linear cross entropy of Liger Kernel,
arXiv 2410.10989, section 3.2; here with torch's own operations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # label of a token that has none
TILE = 1024  # tokens whose logits are widened at a time in `detached`

WithGradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [...,V], labels [...] -> NLL of each token [...] in nats, in fp32 or wider; 0 without a label."""
    rows = logits.to(wide(logits.dtype)).flatten(0, -2)
    flat = F.cross_entropy(rows, labels.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view_as(labels)


def detached(logits: Tensor, labels: Tensor) -> Tensor:
    """As `of_tokens`, without gradients and in little memory, for losses that an engine does not give itself."""
    parts = zip(logits.detach().flatten(0, -2).split(TILE), labels.flatten().split(TILE), strict=True)
    return torch.cat([of_tokens(*part) for part in parts]).view_as(labels)


def with_gradient(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """logits [t,V], labels [t], scale: one number -> NLL of each token [t] in nats, in fp32 or wider, and the gradient
    of their sum x scale [t,V] in the dtype of the logits.

    Compiled, it writes the gradient and nothing else of the size of the logits. Uncompiled it would take more memory
    than `of_tokens` with autograd.
    """
    logarithms = F.log_softmax(logits, dim=-1, dtype=wide(logits.dtype))
    has_label = (labels != IGNORED)[:, None]
    right = torch.where(has_label, labels[:, None], 0)
    losses = torch.where(has_label, -logarithms.gather(-1, right), 0.0)
    is_right = torch.arange(logits.shape[-1], device=logits.device) == right
    gradient = (logarithms.exp() - is_right.to(logarithms.dtype)) * scale
    return losses.squeeze(-1), torch.where(has_label, gradient, 0.0).to(logits.dtype)


def tiled(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    divisor: int,
    tile_tokens: int,
    compiled: WithGradient | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden states [B,s,h], output matrix `weight` [V,h], labels [B,s] -> the sum of the tokens' losses / `divisor`,
    and each token's loss [B,s], in nats. compiled: what torch.compile made of `with_gradient`; None: autograd computes
    the gradients.

    Only the sum is differentiable. It is divided inside, so that gradients are rounded as they are with whole logits.
    """
    loss, each = _Tiled.apply(hidden.flatten(0, 1), weight, labels.flatten(), divisor, tile_tokens, compiled)
    return loss, each.view_as(labels)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        divisor: int,
        tile_tokens: int,
        compiled: WithGradient | None,
    ) -> Any:
        losses, hidden_grad = [], torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=wide(weight.dtype))  # fp32, because it sums over many tiles
        # a tensor: torch.compile would compile each number anew
        scale = torch.full((), 1 / divisor, dtype=weight_grad.dtype, device=hidden.device)
        parts = (x.split(tile_tokens) for x in (hidden, labels, hidden_grad))
        for tile, tile_labels, tile_grad in zip(*parts, strict=True):
            if compiled is None:
                each = _by_autograd(tile, weight, tile_labels, divisor, tile_grad, weight_grad)
            else:
                each, logits_grad = compiled(F.linear(tile, weight), tile_labels, scale)
                torch.mm(logits_grad, weight, out=tile_grad)
                weight_grad += logits_grad.t() @ tile
                del logits_grad  # the next tile's would come beside it
            losses.append(each)
        ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        whole = torch.cat(losses)
        ctx.mark_non_differentiable(whole)
        return whole.sum() / divisor, whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        loss_grad, _ = gradients  # a scalar: 1, unless the loss was scaled
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * loss_grad, weight_grad * loss_grad, None, None, None, None


def _by_autograd(
    tile: Tensor, weight: Tensor, labels: Tensor, divisor: int, tile_grad: Tensor, weight_grad: Tensor
) -> Tensor:
    """The loss of each token. The gradients go into `tile_grad`, and are added to `weight_grad`."""
    leaves = tile.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        each = of_tokens(F.linear(*leaves), labels)
        of_tile, of_weight = torch.autograd.grad(each.sum() / divisor, leaves)
    tile_grad.copy_(of_tile)
    weight_grad += of_weight
    return each.detach()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of losses of logits in `dtype`."""
    return torch.promote_types(dtype, torch.float32)
