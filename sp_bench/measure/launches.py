"""Which kernels of attention a step launched, and how often: each call of the trial's kernel must launch its own.

On CUDA the profiler says what was launched. Elsewhere, where a single step is timed, which is not profiled, and for a
kernel without CUDA kernels of its own, the operations of torch inside the kernel do.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sp_bench import kernels
from sp_bench.config.trial import TrialConfig
from sp_bench.kernels import LOOKS_LIKE_ATTENTION, OF_DELTA, Launches
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.timing import Measurement
from sp_bench.measure.work import PRODUCT_NAMES, Work, shown


def columns(config: TrialConfig, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Row columns from all ranks' measurements, in rank order.

    Raises:
        Incorrect: a rank launched another kernel than the trial's, or not as often as it called it.
    """
    names, total = sorted({config.kernel_of(kind) for kind in config.kinds}), Counter[str]()
    for rank, m in enumerate(measurements):
        if m.cuda_kernels is not None:
            _require_no_other(names, m.cuda_kernels)
        if config.workload.name == "collective":
            continue
        calls = m.expected.kernel_calls is not None
        for name in names:
            if name in OF_DELTA:
                work = replace(m.work, calls=m.work.delta_calls, kernel_ops=m.work.delta_ops)
            else:
                work = replace(m.work, calls=m.work.calls - m.work.delta_calls)
            if m.cuda_kernels is None or kernels.get(name).CUDA_KERNELS is None:
                total.update(_require_ops(rank, name, work) if calls else _require_no_other_ops(rank, name, work))
            elif calls:
                total.update(_require_launches(rank, name, m.cuda_kernels, work, m.profiled_steps))
            else:
                total.update(_require_any(name, m.cuda_kernels, config.workload.pass_kind))
    if not total and measurements[0].cuda_kernels is None:
        return {}  # nothing is known of what ran
    return {"launched_kernels": sorted(total), "kernel_launches": dict(sorted(total.items()))}


def _require_no_other(names: Sequence[str], launched: Launches) -> None:
    """
    Raises:
        Incorrect: kernels of attention were launched that are not the trial's.
    """
    asked = " and ".join(names)
    if others := set[str]().union(*(kernels.launched(launched, name) for name in names)) - {*names}:
        raise Incorrect(f"kernel {asked} was asked for, and {', '.join(sorted(others))} was launched")
    unknown = [kernels.unknown(launched, name) for name in names]
    if unknown_to_all := {name: n for name, n in unknown[0].items() if all(name in each for each in unknown)}:
        raise Incorrect(
            f"kernel {asked} was asked for, and these were launched, which look like attention: "
            f"{shown(unknown_to_all)}; if they are its own, add them to CUDA_HELPERS in its file"
        )


def _require_launches(rank: int, name: str, launched: Launches, work: Work, steps: int) -> Launches:
    """Those of `launched` that are the main kernels of the trial's kernel: one for each call in each of `steps`.

    Raises:
        Incorrect: there are more or fewer.
    """
    forward, backward = kernels.launched(launched, name).get(name, ({}, {}))
    found = sum(forward.values()), sum(backward.values())
    wanted = steps * work.calls["forward"], steps * work.calls["backward"]
    if found != wanted:
        seen = _looking_like_attention(launched) or launched
        raise Incorrect(
            f"rank {rank} launched the CUDA kernels of {name} {found[0]} times forward and {found[1]} backward, and "
            f"called it {wanted[0]} and {wanted[1]} times; launched: {shown(seen)}"
        )
    return {**forward, **backward}


def _require_any(name: str, launched: Launches, pass_kind: str) -> Launches:
    """The same where nobody knows how often a library calls the kernel: at least once.

    Raises:
        Incorrect: it was not launched.
    """
    forward, backward = kernels.launched(launched, name).get(name, ({}, {}))
    if not forward or not (backward or pass_kind == "forward"):
        missing = "backward" if forward else "forward"
        raise Incorrect(f"no CUDA kernel of {name}'s {missing} was launched: {shown(launched)}")
    return {**forward, **backward}


def _require_ops(rank: int, name: str, work: Work) -> Launches:
    """The operations of attention inside the kernel: those that its file declares, as often as it was called; and all
    that look like attention or multiply matrices.

    Raises:
        Incorrect: one that it declares ran more or less often, or one that looks like attention is not declared.
    """
    declared = getattr(kernels.get(name), "OPS", None)
    others = {op: number for op, number in work.kernel_ops.items() if op in PRODUCT_NAMES}
    seen = _looking_like_attention(work.kernel_ops)
    if declared is None:
        return seen | others
    seen |= {op: work.kernel_ops[op] for op in declared}
    calls = work.calls["forward"], work.calls["backward"]
    wanted = {op: forward * calls[0] + backward * calls[1] for op, (forward, backward) in declared.items()}
    if seen != wanted:
        raise Incorrect(
            f"rank {rank} called kernel {name} {calls[0]} times forward and {calls[1]} backward, which is "
            f"{shown(wanted)}; what ran: {shown(seen | others)}"
        )
    return {op: number for op, number in (seen | others).items() if number}


def _require_no_other_ops(rank: int, name: str, work: Work) -> Launches:
    """The operations that look like attention where nobody knows how often a library calls the kernel.

    Raises:
        Incorrect: the kernel declares its operations, and one of these is none of them, or another kernel's.
    """
    declared = getattr(kernels.get(name), "OPS", None)
    of_others = {op for other in kernels.NAMES if other != name for op in getattr(kernels.get(other), "OPS", ())}
    ran = work.other_ops.items()
    if others := {op: n for op, n in ran if (op in of_others if declared is None else op not in declared)}:
        raise Incorrect(f"kernel {name} was asked for, and rank {rank} ran {shown(others)}")
    return work.other_ops


def _looking_like_attention(names: Launches) -> dict[str, int]:
    return {name: number for name, number in names.items() if re.search(LOOKS_LIKE_ATTENTION, name)}
