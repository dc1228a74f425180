"""The message time that a method's schedule leaves exposed: of each pass, what of its messages may hide, and behind
which part of its kernels. The schedules are in attention/head_chunks.py, ring.py and gather.py.

The time of kernels is split over forward and backward by FLOPs. Packing and merging take no time. Hop by hop and group
by group, the model came no nearer to steps that were left out of the fit (predict/projection.py).
"""

from collections.abc import Mapping
from typing import Any

from sp_bench.costs.attention import flash_backward

Times = Mapping[tuple[str, str], float]  # (phase, op) -> ms: bytes over bandwidth


def exposed_ms(asked: Mapping[str, Any], times: Times, compute_ms: float) -> float:
    """Exposed milliseconds of one attention step. asked: the config's columns. times: of all its messages.

    A ring's hops hide behind all blocks but one. What the first group of a gather needs, and what the last one reduces,
    hides behind what needs this rank's KV alone. Of an exchange in chunks the first one's way there and the last one's
    way back hide behind nothing, the rest behind the kernel time that the ring leaves.
    """
    backward = flash_backward(asked["head_dim"], asked["v_head_dim"] or asked["head_dim"])
    forward_ms = compute_ms / float(1 + backward) if asked["pass_kind"] == "forward_backward" else compute_ms
    ranks, chunks = asked["ring_degree"] or 1, asked["head_chunks"] or 1
    groups = -(-asked["num_kv_heads"] // (asked["head_stride"] or asked["num_kv_heads"]))
    own = 1 / (2 * ranks) if asked["causal"] else 0.0
    exposed = 0.0
    for phase, kernels_ms in (("forward", forward_ms), ("backward", compute_ms - forward_ms)):
        sent, exchanged = (times.get((phase, op), 0.0) for op in ("send", "all_to_all"))
        hidden_ms = min(sent, kernels_ms * (ranks - 1) / ranks)
        exposed += sent - hidden_ms
        exposed += exchanged - min(exchanged * (chunks - 1) / chunks, kernels_ms - hidden_ms)
        of_group = sum(times.get((phase, op), 0.0) for op in ("all_gather", "reduce_scatter")) / groups
        exposed += max(0.0, of_group - own * kernels_ms / groups)
        exposed += (groups - 1) * max(0.0, of_group - kernels_ms / groups)
    return exposed
