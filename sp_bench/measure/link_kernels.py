"""Triton kernels of link_clock.py: a message takes its links, and waits until it has arrived. Times are those of the
device's global timer, in ns."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from sp_bench.costs.links import MessageTime


@triton.jit
def _now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["near_ns", "far_ns", "latency_ns"])
def one_rank_message_begins(
    free_at,  # [2]: when the links of the host, and the network card, are free again
    ends_at,  # [1]: when this message has arrived
    near_ns,
    far_ns,
    latency_ns,
):
    now = _now()
    ends = now
    # Two atomics are enough: what another message adds between them only pushes this one behind it.
    if near_ns > 0:
        tl.atomic_max(free_at, now)
        ends = tl.maximum(ends, tl.atomic_add(free_at, near_ns.to(tl.int64)) + near_ns)
    if far_ns > 0:
        tl.atomic_max(free_at + 1, now)
        ends = tl.maximum(ends, tl.atomic_add(free_at + 1, far_ns.to(tl.int64)) + far_ns)
    tl.store(ends_at, ends + latency_ns)


@triton.jit
def one_rank_message_ends(ends_at):
    end = tl.load(ends_at)
    now = _now()
    while now < end:
        now = _now()


def take_links(free_at: Tensor, ends_at: Tensor, time: MessageTime) -> None:
    """Begin a message on the current stream."""
    near_ns, far_ns, latency_ns = (round(1e9 * seconds) for seconds in time)
    one_rank_message_begins[(1,)](free_at, ends_at, near_ns, far_ns, latency_ns, num_warps=1)  # pyright: ignore[reportIndexIssue]


def wait_for_end(ends_at: Tensor) -> None:
    """Let the current stream wait until the message has arrived. One warp waits, and leaves the device to others."""
    one_rank_message_ends[(1,)](ends_at, num_warps=1)  # pyright: ignore[reportIndexIssue]
