"""A language model's loss: of whole logits, or of a tile of them at a time.

N local tokens, h hidden size, V vocabulary. Of a long sequence the logits outweigh all else that a step keeps: with
their gradients about 12 bytes x N x V in bf16, whose softmax is in fp32. Tiles of t tokens take that for t instead of
N, and the output matrix's gradient in fp32 once.

Source: the fused linear cross entropy of Liger Kernel, arXiv 2410.10989, section 3.2, by torch's own operations. The
loss is the last of the forward, so a tile's gradients are computed at once, while its logits exist: nothing is computed
twice, and the FLOPs are those of whole logits.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # label of a padded token


def of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """NLL in nats of each token, 0 where padded: logits [...,V], labels [...] -> [...], in fp32 or wider."""
    wide = logits.to(_wide(logits.dtype))
    flat = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view_as(labels)


def tiled(hidden: Tensor, weight: Tensor, labels: Tensor, *, divisor: int, tile_tokens: int) -> tuple[Tensor, Tensor]:
    """The sum of the tokens' losses / `divisor`, and each token's loss [B,s]: of hidden states [B,s,h], the output
    matrix [V,h] and labels [B,s]. Gradients flow through the sum alone; `divisor` is inside, so that they are rounded
    as those of whole logits are.
    """
    loss, each = _Tiled.apply(hidden.flatten(0, 1), weight, labels.flatten(), divisor, tile_tokens)
    return loss, each.view_as(labels)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, divisor: int, tile_tokens: int) -> Any:
        losses, hidden_grad = [], torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=_wide(weight.dtype))  # a sum of many tiles
        parts = (x.split(tile_tokens) for x in (hidden, labels, hidden_grad))
        for tile, tile_labels, tile_grad in zip(*parts, strict=True):
            leaves = tile.detach().requires_grad_(), weight.detach().requires_grad_()
            with torch.enable_grad():
                each = of_tokens(F.linear(*leaves), tile_labels)
                gradients = torch.autograd.grad(each.sum() / divisor, leaves)
            losses.append(each.detach())
            tile_grad.copy_(gradients[0])
            weight_grad += gradients[1]
        ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        whole = torch.cat(losses)
        ctx.mark_non_differentiable(whole)
        return whole.sum() / divisor, whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        loss_grad, _ = gradients  # a scalar; 1 but for a scaled loss
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * loss_grad, weight_grad * loss_grad, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
