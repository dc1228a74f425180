"""The message time that a method's schedule leaves exposed, if each message hides behind the kernel that runs beside
it. The schedules are in attention/head_chunks.py, ring.py and gather.py.

The model assumes kernels of equal length, and splits their time over forward and backward by FLOPs. Packing and merging
take no time.
"""

from collections.abc import Mapping
from typing import Any

from sp_bench.costs.attention import flash_backward

Times = Mapping[tuple[str, str], float]  # (phase, op) -> ms: bytes over bandwidth


def exposed_ms(asked: Mapping[str, Any], times: Times, compute_ms: float) -> float:
    """Exposed milliseconds of one attention step. asked: the config's columns. times: of all its messages."""
    backward = flash_backward(asked["head_dim"], asked["v_head_dim"] or asked["head_dim"])
    forward_ms = compute_ms / float(1 + backward) if asked["pass_kind"] == "forward_backward" else compute_ms
    passes = {"forward": forward_ms, "backward": compute_ms - forward_ms}
    around = _ring(asked["ring_degree"] or 1, times, passes)
    exposed = sum(around.values()) + _gather(asked, times, passes)
    for phase, kernels_ms in passes.items():  # the exchange hides behind the kernel time that the ring leaves
        left_ms = kernels_ms - (times.get((phase, "send"), 0.0) - around[phase])
        exposed += _exchange(times.get((phase, "all_to_all"), 0.0), left_ms, asked["head_chunks"] or 1)
    return exposed


def _beyond(message_ms: float, kernel_ms: float) -> float:
    return max(0.0, message_ms - kernel_ms)


def _exchange(both_ways_ms: float, kernels_ms: float, chunks: int) -> float:
    """Exposed ms of an exchange. No kernel runs beside the first chunk's way there and the last one's way back."""
    if chunks == 1:
        return both_ways_ms
    message, kernel = both_ways_ms / chunks, kernels_ms / chunks
    return message + 2 * _beyond(message / 2, kernel) + (chunks - 2) * _beyond(message, kernel)


def _ring(ranks: int, times: Times, passes: Mapping[str, float]) -> dict[str, float]:
    """Exposed ms of each pass of a ring. A block runs beside each hop. In the backward KV and dK/dV travel as one
    message, except the first and the last, beside each of which half of the own block runs."""
    hops = max(ranks - 1, 1)
    kv, both = times.get(("forward", "send"), 0.0) / hops, times.get(("backward", "send"), 0.0) / hops
    forward, backward = passes["forward"] / ranks, passes["backward"] / ranks
    exposed = {"forward": hops * _beyond(kv, forward), "backward": 0.0}
    if both > 0:
        exposed["backward"] = _beyond(kv, backward / 2) + _beyond(both - kv, backward / 2)
        for step in range(1, ranks):
            message = kv * (step < ranks - 1) + (both - kv) * (step > 1)
            exposed["backward"] += _beyond(message, backward)
    return exposed


def _gather(asked: Mapping[str, Any], times: Times, passes: Mapping[str, float]) -> float:
    """Exposed ms of both passes of an all-gather. Beside the first group's gather runs what needs only this rank's KV,
    beside each later one a group. In the backward a group also runs beside the last reduction."""
    groups = -(-asked["num_kv_heads"] // (asked["head_stride"] or asked["num_kv_heads"]))
    own = 1 / (2 * (asked["ring_degree"] or 1)) if asked["causal"] else 0.0
    forward, backward = (each / groups for each in passes.values())
    gathered = times.get(("forward", "all_gather"), 0.0) / groups
    again, reduced = (times.get(("backward", op), 0.0) / groups for op in ("all_gather", "reduce_scatter"))
    exposed = _beyond(gathered, own * forward) + _beyond(again, own / 2 * backward)
    exposed += _beyond(reduced, own / 2 * backward)
    return exposed + (groups - 1) * (_beyond(gathered, forward) + _beyond(again + reduced, backward))
