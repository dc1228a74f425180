"""Identities of attention's results. They hold for any inputs and need no reference, so all rows of the timed length
can be checked.

For each KV head, over all tokens, and over the query heads that read it:

    sum dv = sum dout             the weights of a row add up to 1
    sum dk = 0                    a vector added to all keys changes no weight
    sum <q,dq> = sum <k,dk>       both sides are the sum of scores x their gradients
    sum <v,dv> = sum <out,dout>   both sides are the sum of weights x their gradients

A difference is divided by the root sum of squares of the terms of both sides. The tokens' rounding errors are
independent, so the quotient of a right result hardly grows with the length.

What it finds belongs to this execution: every trial checks it again.

B batch, c tokens of a chunk, Hq and Hkv heads, g = Hq/Hkv, D head size, Dv that of values, outputs and their gradients.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench.config.prose import Prose
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle.latents import products
from sp_bench.oracle.reduced_length import Errors, all_reduce, reference_dtype

IDENTITIES: Mapping[str, Prose] = {
    "sum_dv": "sum dv = sum dout",
    "sum_dk": "sum dk = 0",
    "q_dq": "sum <q,dq> = sum <k,dk>",
    "v_dv": "sum <v,dv> = sum <out,dout>",
}
OF_LATENTS: Mapping[str, Prose] = {
    "q_dq": "sum <q,dq> + <out,dout> = sum <latent,dlatent>",
    "v_dv": "sum <up,dup> = sum <latent,dlatent> over what is projected",
}
OF_WEIGHTS = ("sum_dv", "sum_dk")  # need weights that add up to 1
CHUNK = 2**21  # elements of q that are widened at a time, to bound the memory


def check_identities(
    inputs: Sequence[Tensor], results: Sequence[Tensor], mesh: DeviceMesh, what: Prose, *, sinks: bool = False
) -> Errors:
    """The largest quotient of each identity over all KV heads; equal on every rank of the sequence. With `sinks` the
    weights of a row's keys add up to less than 1, so that only the identities of products hold.

    inputs: this rank's q, k, v and dout; `results`: its output, dq, dk and dv of a step that read them.

    Raises:
        Incorrect: a quotient is above its budget, or not a number; the message begins with `what`.
    """
    q, _, v, _ = inputs
    if v.dim() == 3:  # up-projections
        return _of_latents(inputs, results, mesh, what)
    sizes = [v.shape[-1], q.shape[-1], 1, 1]
    differences, squares = all_reduce(_sums(inputs, results), mesh).split([sum(sizes), 4], dim=1)
    quotients: Errors = {}
    for name, difference, square in zip(IDENTITIES, differences.split(sizes, dim=1), squares.T, strict=True):
        if sinks and name in OF_WEIGHTS:
            continue
        found, head = (difference.norm(dim=1) / square.sqrt()).max(0)
        quotients[name], limit = float(found), budget(name, inputs[0].dtype)
        if not quotients[name] <= limit:  # also true for NaN
            raise Incorrect(
                f"{what}: {IDENTITIES[name]} does not hold in KV head {int(head)}: the sides differ by "
                f"{quotients[name]:.2e} of the root sum of squares of their terms, budget {limit:.2e}"
            )
    return quotients


def _of_latents(inputs: Sequence[Tensor], results: Sequence[Tensor], mesh: DeviceMesh, what: Prose) -> Errors:
    """The same of q, latents, up-projections and dout: two identities, of all heads together (`latents.products`)."""
    quotients: Errors = {}
    for name, (left, right, squares) in zip(("q_dq", "v_dv"), all_reduce(products(inputs, results), mesh), strict=True):
        quotients[name], limit = float((left - right).abs() / squares.sqrt()), budget(name, inputs[0].dtype)
        if not quotients[name] <= limit:
            raise Incorrect(
                f"{what}: {OF_LATENTS[name]} does not hold: the sides differ by {quotients[name]:.2e} of the root sum "
                f"of squares of their terms, budget {limit:.2e}"
            )
    return quotients


def budget(identity: str, dtype: torch.dtype) -> float:
    """The largest quotient of a result in `dtype` that passes: 3.5 times the largest of any right result that was
    measured, and for `sum_dv` in half precision six times. That is so narrow that dv may be off by 2% in no KV head."""
    if dtype.itemsize == 2:
        return (1 if identity == "sum_dv" else 8) * torch.finfo(dtype).eps
    return 64 * torch.finfo(dtype).eps


def _sums(inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Tensor:
    """This rank's share of the sums, of each KV head: the differences of the two vectors and the two numbers, and then
    the sum of squares of each identity's terms. [Hkv,Dv+D+2+4] in fp64."""
    q, k, v = inputs[:3]
    wide, chunk_len = reference_dtype(q.dtype, q.device), max(CHUNK // q[:, :1].numel(), 1)
    total = q.new_zeros(k.shape[2], v.shape[-1] + q.shape[-1] + 6, dtype=torch.float64)
    for chunk in zip(*(x.split(chunk_len, dim=1) for x in (*inputs, *results)), strict=True):
        total += _of_chunk(*(x.to(wide).unflatten(2, (k.shape[2], -1)) for x in chunk))
    return total


def _of_chunk(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """As `_sums`, of c tokens; q, dout, out and dq are [B,c,Hkv,g,.], the others [B,c,Hkv,1,.]."""
    differences, squares = [], []
    for left, right in ((dv, dout), (dk, dk[:0]), (_dot(q, dq), _dot(k, dk)), (_dot(v, dv), _dot(out, dout))):
        differences.append(_sum(left) - _sum(right))
        squares.append((_sum(left.square()).sum(1) + _sum(right.square()).sum(1))[:, None])
    return torch.cat(differences + squares, dim=1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _sum(terms: Tensor) -> Tensor:
    """[B,c,Hkv,g,n] -> [Hkv,n] in fp64."""
    return terms.sum((0, 1, 3), dtype=torch.float64)
