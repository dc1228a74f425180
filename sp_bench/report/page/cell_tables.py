"""Every cell in a table, one a setting: what the paper tables leave out."""

from collections.abc import Sequence
from itertools import groupby

from sp_bench.report.cells import Cell
from sp_bench.report.fabric_model import foremost, places
from sp_bench.report.formats import MISSING, in_bytes, number, whole
from sp_bench.report.page.parts import Line, Ref, Table, ref
from sp_bench.report.ratios import baseline

OPEN = 3  # more tables than this are opened by the reader
LEFT = (0,)
CAPTION = (
    "One line a cell. Memory: {memory}, largest rank. Speed-up is strong scaling: step time of its baseline, single on "
    "one rank at the same seq_len, over this step time. Error: the tensor nearest to its budget, as a share of it. "
    "Columns without any value are left out."
)
FLOPS = " Attention TFLOP/s: causal pairs only, forward 1 and backward 2.5."
MEMORY = {"max_peak_allocated_bytes": "allocated on the device", "max_peak_host_bytes": "host, resident set"}


def cell_tables(cells: Sequence[Cell]) -> list[Table]:
    """Those of slower fabrics, which the section on fabrics compares, are opened by the reader. Messages alone have a
    section of their own."""
    first = {cell.setting for cell in foremost(cells, places(cells))}
    steps = [cell for cell in cells if cell.asked["workload"] != "collective"]
    groups = {setting: list(group) for setting, group in groupby(steps, key=lambda c: c.setting)}
    return [_table(s, group, s not in first or len(groups) > OPEN) for s, group in groups.items()]


def _table(setting: str, cells: Sequence[Cell], folded: bool) -> Table:
    memory = " or ".join(sorted({MEMORY[c.memory_column] for c in cells if c.memory_column})) or "not known"
    caption = CAPTION.format(memory=memory) + (FLOPS if any(c.attention_flops_per_step for c in cells) else "")
    singles = [c for c in cells if c.asked["method"] == "single"]
    columns = [_columns(cell, singles) for cell in cells]
    known = [name for name in columns[0] if any(each[name] != MISSING for each in columns)]
    lines = (
        Line(tuple(each[n] for n in known), (cell,), _note(cell)) for cell, each in zip(cells, columns, strict=True)
    )
    return Table(setting, caption, tuple(known), tuple(lines), LEFT, folded)


def _columns(cell: Cell, singles: Sequence[Cell]) -> dict[str, str | Ref]:
    ms, interval, comm, asked = cell.median_step_ms, cell.interval_ms, cell.communication, cell.asked
    start = baseline(cell, singles)
    speed_up = start.median_step_ms / ms if start and start.median_step_ms and ms else None
    return {
        "method": cell.series,
        "sp_size": whole(asked["sp_size"]),
        "ulysses x ring": " x ".join(whole(asked[name]) for name in ("ulysses_degree", "ring_degree")),
        "seq_len (tokens)": whole(asked["seq_len"]),
        "replicates ok": f"{len(cell.step_ms)} of {len(cell.rows)}",
        "step (ms)": number(ms),
        "interval (ms)": f"[{number(interval.low)}, {number(interval.high)}]" if interval else MISSING,
        "coverage": f"{interval.coverage:.1%}" if interval else MISSING,
        "tokens/s": number(cell.rate(ms, per_rank=False) if ms else None),
        f"tokens/s/{cell.processor}": number(cell.rate(ms, per_rank=True) if ms else None),
        f"attention TFLOP/s/{cell.processor}": number(cell.attention_tflops(ms) if ms else None),
        "speed-up, strong": ref(f"{speed_up:.2f}x", (cell, start)) if speed_up and start else MISSING,
        "MFU": MISSING if cell.mfu is None else f"{cell.mfu:.1%}",
        "HFU": MISSING if cell.hfu is None else f"{cell.hfu:.1%}",
        "host, a launch (\N{MICRO SIGN}s)": number(cell.middle("host_launch_us")),
        "memory": in_bytes(cell.median_memory_bytes),
        "bytes predicted": in_bytes(comm.predicted_bytes),
        "bytes counted": in_bytes(comm.counted_bytes),
        "equal": {True: "yes", False: "no", None: MISSING}[comm.equal],
        "bytes on the wire": in_bytes(cell.middle("comm_wire_bytes")),
        "error / budget": _worst_error(cell),
    }


def _worst_error(cell: Cell) -> str:
    """The tensor that comes nearest to its budget, as a share of it."""
    shares = {name: error / budget for name, (error, budget) in cell.errors.items() if budget}
    if not shares:
        return MISSING
    name = max(shares, key=lambda n: shares[n])
    return f"{shares[name]:.2f} ({name})"


def _note(cell: Cell) -> str:
    """What a reader of the numbers must not miss."""
    notes = [*(status for status in cell.statuses if status != "ok"), *cell.flags, cell.throttle_note]
    if cell.communication.equal is False:
        notes.append("bytes predicted and counted differ")
    return "; ".join(note for note in notes if note)
