"""The section on the device: power, clocks, throttling, bytes on the wire and the kernels that ran."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from sp_bench.report.cells import Cell, listed
from sp_bench.report.formats import MISSING, counted, in_bytes, number, whole
from sp_bench.report.page.parts import Line, Section, Table, Words, ref, say

COLUMNS = ("energy_j", "device_state", "comm_wire_bytes", "launched_kernels")
HEAD = (
    *("method", "sp_size", "seq_len (tokens)", "energy a step (J)", "power a device (W)", "SM clock (MHz)"),
    *("temperature (°C)", "throttled by", "sent, counted", "sent, on the wire", "wire - counted", "attention kernels"),
)
BASIS = "Values of single cells: no scaling, and no ratio but that of bytes on the wire to the bytes counted."
REASONS = {
    "sw_power_cap": "clocks were lowered to stay within the device's power limit, as sustained matrix work does",
    "sw_thermal_slowdown": "clocks were lowered by the driver to stay below a temperature",
    "hw_thermal_slowdown": "clocks were cut by the device because it was too hot",
    "hw_power_brake_slowdown": "clocks were cut by the device on a signal of its power supply",
}
KERNELS_HEAD = ("kernel", "cells", "launched, of one profiled step")
FOLD = 3  # more tables than this are opened by the reader
CAPTION = (
    "Energy: all ranks, over the timed window. Power: energy of a device / step time. Clocks, temperatures and "
    "throttle reasons: sampled while the device works on untimed steps, smallest to largest over ranks and replicates. "
    f"On the wire: NVLink counters, protocol included; counted bytes include phase other here. {MISSING}: not told, "
    "or the traffic takes another way than NVLink."
)


def section(cells: Sequence[Cell]) -> Section | None:
    """None where no row knows anything of its device."""
    speeds = [c for c in cells if c.ok and c.asked["workload"] != "parity"]
    known = [c for c in speeds if any(_known(row[name]) for row in c.measured for name in COLUMNS)]
    if not known:
        return None
    words: list[Words] = []
    if throttled := [c for c in known if c.throttled]:
        reasons = sorted({reason for c in throttled for reason in c.throttled})
        meant = "; ".join(f"{reason}: {REASONS.get(reason, 'as the driver names it')}" for reason in reasons)
        share = say(ref(f"{len(throttled):,}", throttled), " of ", ref(counted(len(known), "cell"), known))
        why = f", in which a sample of any rank gave such a reason. {meant}."
        words.append(say("Marked as throttled, here and in the tables: ", share, why))
    if absent := len(speeds) - len(known):
        none = [c for c in speeds if not any(c is other for other in known)]
        words.append(
            say(ref(counted(absent, "cell"), none), " without any of these columns: CPU, or the device tells nothing.")
        )
    groups = {setting: list(group) for setting, group in groupby(known, key=lambda c: c.setting)}
    tables = [
        Table(setting, CAPTION, HEAD, tuple(map(_line, group)), (0, 7, 11), folded=len(groups) > FOLD)
        for setting, group in groups.items()
    ]
    return Section("device", "Device", BASIS, words=tuple(words), tables=(*tables, *_kernels(known)))


def _kernels(cells: Sequence[Cell]) -> list[Table]:
    """Which kernels ran, those of equal cells on one line."""
    grouped: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        if names := tuple(_kernel_names(cell)):
            grouped.setdefault(names, []).append(cell)
    lines = [
        Line(
            (" + ".join(sorted({str(c.asked["kernel"]) for c in each})), counted(len(each), "cell"), "\n".join(names)),
            tuple(each),
        )
        for names, each in grouped.items()
    ]
    return (
        [Table("Attention kernels that were launched", "", KERNELS_HEAD, tuple(lines), (0, 2), folded=True)]
        if lines
        else []
    )


def _kernel_names(cell: Cell) -> list[str]:
    return sorted({str(name) for row in cell.measured for name in listed(row["launched_kernels"])})


def _known(value: Any) -> bool:
    return value is not None if not isinstance(value, Iterable) else len(listed(value)) > 0


def _line(cell: Cell) -> Line:
    energy = [(row, list(row["energy_j"])) for row in cell.measured if _known(row["energy_j"])]
    joules = median(sum(each) for _, each in energy) if energy else None
    watts = median(1e3 * sum(each) / len(each) / row["median_step_ms"] for row, each in energy) if energy else None
    states = [state for row in cell.measured for state in listed(row["device_state"])]
    reasons = sorted({str(reason) for state in states for reason in listed(state["throttle_reasons"])})
    counted_bytes, wire_bytes = _sent(cell)
    more = MISSING if not counted_bytes or wire_bytes is None else f"{wire_bytes / counted_bytes - 1:+.2%}"
    kernels = _kernel_names(cell)
    texts = (
        *(cell.series, whole(cell.asked["sp_size"]), whole(cell.asked["seq_len"]), number(joules), number(watts)),
        *(_span(states, "sm_clock_mhz"), _span(states, "temperature_c"), ", ".join(reasons) or MISSING),
        *(in_bytes(counted_bytes), in_bytes(wire_bytes), more),
        counted(len(kernels), "kernel") if kernels else MISSING,
    )
    return Line(texts, (cell,), cell.throttle_note)


def _span(states: Sequence[Mapping[str, Any]], name: str) -> str:
    values = sorted({state[name] for state in states if state[name] is not None})
    if not values:
        return MISSING
    return whole(values[0]) if len(values) == 1 else f"{whole(values[0])} to {whole(values[-1])}"


def _sent(cell: Cell) -> tuple[float | None, float | None]:
    """(counted, on the wire) bytes of the rank that sends most; medians over the replicates that know the wire."""
    rows = [row for row in cell.measured if row["comm_wire_bytes"] is not None]
    other = cell.communication.phases.get("other", (None, None))[1] or 0.0
    if not rows:
        return (None if (size := cell.middle("comm_counted_bytes")) is None else size + other), None
    known = [row["comm_counted_bytes"] + other for row in rows if row["comm_counted_bytes"] is not None]
    return (median(known) if known else None), median(row["comm_wire_bytes"] for row in rows)
