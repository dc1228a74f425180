"""The appendix of a page: every row, what failed and why, further columns of every cell, and where rows come from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell, listed
from sp_bench.analysis.device_sets import several
from sp_bench.analysis.effort import effort
from sp_bench.analysis.formats import MISSING, counted, in_bytes, number, whole
from sp_bench.analysis.pattern_bytes import pattern_bytes
from sp_bench.analysis.selection import Selection
from sp_bench.analysis.time_parts import attributions
from sp_bench.report.published import beside

NAMED = ("hostname", "cpu", "cpu_cores", "driver", "cuda", "cudnn", "nccl", "process_group", "python", "topology")
MAX_REASON = 2000  # characters of one reason; the row holds the rest
MAX_LINES = 1000  # of one table


@dataclass(frozen=True)
class AppendixTable:
    title: str
    about: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    ids: tuple[str, ...] = ()  # of the lines


class Numbers:
    """The number of each cell on a page, from 1: a table's line links to the rows of its cell."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._numbers = {cell.cell_id: number for number, cell in enumerate(cells, 1)}

    def __call__(self, cell: Cell) -> int:
        return self._numbers[cell.cell_id]


def appendix(cells: Sequence[Cell], numbers: Numbers) -> list[AppendixTable]:
    """Those that have lines."""
    made = (
        _failures(cells),
        _cells(cells, numbers),
        _parts(cells),
        _bytes(cells),
        _messages(cells),
        training(cells),
        parity(cells),
        beside(cells),
        device(cells),
    )
    return [*(_cut(AppendixTable(*each)) for each in made if each[3]), _rows(cells, numbers)]


Made = tuple[str, str, tuple[str, ...], tuple[tuple[str, ...], ...]]


def _cut(table: AppendixTable) -> AppendixTable:
    if len(table.lines) <= MAX_LINES or table.ids:
        return table
    about = f"{table.about} The first {MAX_LINES:,} of {len(table.lines):,} lines; the rows hold the others."
    return AppendixTable(table.title, about.strip(), table.heads, table.lines[:MAX_LINES])


def name(cell: Cell) -> str:
    return ", ".join(filter(None, [words.method(cell), words.place(cell)]))


def _failures(cells: Sequence[Cell]) -> Made:
    """One line for each (status, phase, reason), those of most trials first."""
    grouped: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        for row in cell.rows:
            if row["status"] != "ok":
                site = f" ({row['oom_site']})" if row["oom_site"] is not None else ""
                reason = "no reason given" if row["reason"] is None else str(row["reason"])
                more = (
                    f" … ({len(reason) - MAX_REASON:,} more characters in the row)" if len(reason) > MAX_REASON else ""
                )
                key = (f"{row['status']}{site}", str(row["phase"] or MISSING), reason[:MAX_REASON] + more)
                grouped.setdefault(key, []).append(cell)
    lines = []
    for (status, phase, reason), group in sorted(
        grouped.items(), key=lambda item: (item[0][0], -len(item[1]), item[0])
    ):
        named = list(dict.fromkeys(map(name, group)))
        what = "; ".join(named[:4]) + (f"; and {len(named) - 4} more" if len(named) > 4 else "")
        lines.append((status, phase, str(len(group)), what, reason))
    return "Not ok: what failed and why", "", ("status", "phase", "trials", "what", "reason"), tuple(lines)


def _cells(cells: Sequence[Cell], numbers: Numbers) -> Made:
    heads = (
        "cell",
        "setting",
        "series",
        "sp_size",
        "seq_len",
        "replicates ok",
        "step (ms)",
        "interval (ms)",
        "coverage",
        "HFU",
        "bytes predicted",
        "bytes counted",
        "on the wire",
        "error / budget",
        "flags",
    )
    about = "Every cell by its identifiers. Error: the tensor nearest to its budget, as a share of it."
    return "Every cell", about, heads, tuple(_cell(cell, numbers) for cell in cells)


def _cell(cell: Cell, numbers: Numbers) -> tuple[str, ...]:
    interval, sent, asked = cell.interval_ms, cell.communication, cell.asked
    shares = {what: error / budget for what, (error, budget) in cell.errors.items() if budget}
    worst = max(shares, key=lambda n: shares[n], default=None)
    return (
        str(numbers(cell)),
        cell.setting,
        cell.series,
        whole(asked["sp_size"]),
        whole(asked["seq_len"]),
        f"{len(cell.step_ms)} of {len(cell.rows)}",
        number(cell.median_step_ms),
        f"[{number(interval.low)}, {number(interval.high)}]" if interval else MISSING,
        f"{interval.coverage:.1%}" if interval else MISSING,
        MISSING if cell.hfu is None else f"{cell.hfu:.1%}",
        in_bytes(sent.predicted_bytes),
        in_bytes(sent.counted_bytes),
        in_bytes(cell.middle("comm_wire_bytes")),
        MISSING if worst is None else f"{shares[worst]:.2f} ({worst})",
        ", ".join([*cell.flags, cell.throttle_note] if cell.throttle_note else cell.flags),
    )


def _parts(cells: Sequence[Cell]) -> Made:
    heads = (
        "what",
        "kernel",
        "step (ms)",
        "kernel alone (ms)",
        "of its speed",
        "computing beyond it (ms)",
        "imbalance (ms)",
        "exposed messages (ms)",
        "messages alone (ms)",
        "overlap efficiency",
        "unsettled arms",
    )
    about = (
        "Where the time of an attention step goes. Arms are the same step timed without messages, and without kernels."
    )
    lines = tuple(
        (
            name(a.cell),
            words.kernel(a.cell),
            number(a.cell.median_step_ms),
            number(a.alone_ms),
            a.fraction_words,
            a.beyond_kernel.words if a.beyond_kernel else MISSING,
            a.imbalance.words if a.imbalance else MISSING,
            a.exposed.words if a.exposed else MISSING,
            number(a.comm_only_ms),
            MISSING if a.overlap_efficiency is None else f"{a.overlap_efficiency:.2f}",
            ", ".join(a.unsettled_arms),
        )
        for a in attributions(cells)
    )
    return "Parts of a step", about, heads, lines


def _bytes(cells: Sequence[Cell]) -> Made:
    """Of libraries: how their bytes differ from those of our method of their kind."""
    lines = []
    for cell in cells:
        if cell.ok and cell.is_library and (found := pattern_bytes(cell)) is not None:
            why = "; ".join(f"{reason}: {in_bytes(size)}" for reason, size in found.reasons.items()) or "none"
            lines.append(
                (
                    name(cell),
                    found.pattern,
                    in_bytes(found.closed_form),
                    in_bytes(found.counted),
                    f"{found.ratio:.3f}x",
                    why,
                )
            )
    heads = ("what", "our method of its kind", "its closed form", "counted", "ratio", "what the difference is")
    return "Bytes of libraries", "", heads, tuple(lines)


def _messages(cells: Sequence[Cell]) -> Made:
    lines = []
    for cell in cells:
        if cell.ok and cell.asked["workload"] == "collective":
            rate = cell.middle("bandwidth_bytes_per_s")
            largest = (cell.communication.counted_bytes or 0.0) / (cell.median_step_ms or 1.0) * 1e3
            lines.append(
                (
                    cell.series,
                    words.fabric(cell.asked["fabric"]),
                    whole(cell.asked["sp_size"]),
                    f"{in_bytes(largest)}/s",
                    f"{in_bytes(rate)}/s",
                    number(cell.middle("latency_us")),
                )
            )
    heads = ("primitive", "fabric", "ranks", "largest message", "slope of all sizes", "latency (\N{MICRO SIGN}s)")
    return "Messages alone", "Bytes one rank sends off-rank a second.", heads, tuple(lines)


LOADED = {"before": "before the first step", "in_step": "in each step"}
CHECKED = {"method": "method and step", "step_only": "step only", None: MISSING}


def training(cells: Sequence[Cell]) -> Made:
    """What was checked of training steps before they were timed, and where their tokens come from."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        if cell.asked["workload"] == "train_step" and cell.ok:
            loaded = {LOADED.get(row["batch_loading"], "not recorded") for row in cell.measured}
            checked = {CHECKED[row["fp32_proof"]] for row in cell.measured}
            asked = (str(cell.asked["engine"]), words.method(cell), words.kernel(cell), str(cell.asked["dtype"]))
            groups.setdefault((*asked, " or ".join(sorted(loaded)), " or ".join(sorted(checked))), []).append(cell)
    lines = []
    for (*asked, loaded, checked), group in sorted(groups.items()):
        (worst, parameter), (in_fp32, _) = (_worst(group, column) for column in ("grad_error", "fp32_grad_error"))
        update = number(_worst(group, "update_error")[0])
        lines.append((*asked, loaded, number(worst), parameter or MISSING, checked, number(in_fp32), update))
    heads = (
        "engine",
        "method",
        "kernel",
        "dtype",
        "tokens are loaded",
        "worst gradient (relative)",
        "its parameter",
        "also checked in float32",
        "worst gradient there (relative)",
        "update off by (roundings)",
    )
    about = f"At a reduced length and with two layers, against one process. {MISSING}: not compared, as in older rows."
    return "What was checked of training steps", about, heads, tuple(lines)


def _worst(cells: Sequence[Cell], column: str) -> tuple[float | None, str | None]:
    """The largest error of the cells' rows, and whose it is."""
    found = [row[column] for cell in cells for row in cell.measured if row[column] is not None]
    worst = max(found, key=lambda each: each["error"], default={"error": None, "parameter": None})
    return worst["error"], worst["parameter"]


def parity(cells: Sequence[Cell]) -> Made:
    lines = tuple(
        (
            name(c),
            str(c.asked["engine"]),
            *(
                MISSING if (v := c.largest(column)) is None else f"{v:.1e}"
                for column in ("max_nll_difference", "mean_nll_difference", "max_grad_norm_difference")
            ),
        )
        for c in cells
        if c.ok and c.asked["workload"] == "parity"
    )
    heads = ("what", "engine", "largest NLL difference (nats)", "mean (nats)", "gradient norm, relative")
    return "Training parity, against one process", "", heads, lines


def device(cells: Sequence[Cell]) -> Made:
    lines = []
    for cell in cells:
        states = [s for row in cell.measured for s in listed(row["device_state"])]
        if not states:
            continue
        ranges = [_range([s[key] for s in states]) for key in ("sm_clock_mhz", "power_w", "temperature_c")]
        energy = [v for row in cell.measured for v in listed(row["energy_j"]) if v is not None]
        lines.append(
            (
                name(cell),
                words.kernel(cell),
                *ranges,
                _range(energy),
                ", ".join(cell.throttled),
                number(cell.middle("host_launch_us")),
            )
        )
    heads = (
        "what",
        "kernel",
        "SM clock (MHz)",
        "power (W)",
        "temperature (C)",
        "energy a step (J)",
        "throttled by",
        "host, a launch (\N{MICRO SIGN}s)",
    )
    return "The devices while they worked", "Ranges over ranks and replicates.", heads, tuple(lines)


def _range(values: Sequence[float | None]) -> str:
    known = sorted(v for v in values if v is not None)
    if not known:
        return MISSING
    low, high = number(known[0]), number(known[-1])
    return low if low == high else f"{low} to {high}"


def _rows(cells: Sequence[Cell], numbers: Numbers) -> AppendixTable:
    lines, ids = [], []
    for cell in cells:
        for i, row in enumerate(cell.rows):
            replicate = MISSING if row["replicate"] is None else str(row["replicate"])
            lines.append(
                (
                    f"{numbers(cell)}: {cell.series}, {words.place(cell)}" if i == 0 else "",
                    str(row["trial_id"]),
                    replicate,
                    str(row["status"]),
                    number(row["median_step_ms"]),
                    str(row["file"]),
                )
            )
            ids.append(f"c{numbers(cell)}" if i == 0 else "")
    heads = ("cell", "trial_id", "replicate", "status", "median step (ms)", "file")
    return AppendixTable("Rows", "What the lines of the tables link to.", heads, tuple(lines), tuple(ids))


def left_out(selection: Selection) -> list[str]:
    lines = [
        f"{counted(rows, 'row')} of core_id {core_id}: their cells were measured again later, with other code, "
        "libraries or devices"
        for core_id, rows in selection.left_out.items()
    ]
    if selection.num_superseded:
        lines.append(f"{counted(selection.num_superseded, 'earlier attempt')} of trials whose last attempt counts")
    return lines


def environment(selection: Selection) -> list[tuple[str, str]]:
    """(what, its values over the rows). More than one value of a thing is shown as such."""
    rows = selection.rows
    environments = [e for e in rows["environment"] if isinstance(e, dict)]
    statuses = ", ".join(f"{n:,} {status}" for status, n in Counter(map(str, rows["status"])).most_common())
    started = rows["started_at"].dropna()
    facts = [
        ("campaigns", _values(rows["folder"])),
        ("rows", f"{selection.num_read:,} read, {len(rows):,} used ({statuses or 'none'})"),
        ("core_id", selection.core_id or MISSING),
        (
            "started",
            f"{started.min():%Y-%m-%d %H:%M} to {started.max():%Y-%m-%d %H:%M} UTC" if len(started) else MISSING,
        ),
        ("git", _values(_commit(sha, dirty) for sha, dirty in zip(rows["git_sha"], rows["git_dirty"], strict=True))),
        ("schema", _values(rows["schema_version"])),
        ("effort", _effort(rows)),
    ]
    facts += [(each.replace("_", " "), _values(e.get(each) for e in environments)) for each in NAMED]
    devices = (_values(_multiset(e.get("device_names")) for e in environments), several(rows["device_set"].dropna()))
    facts.append(("devices", "; ".join(filter(None, devices))))
    for what, column in (("libraries", "packages"), ("variables", "env")):
        facts.append((what, _values(f"{key} {value}" for e in environments for key, value in listed(e.get(column)))))
    return [(what, value) for what, value in facts if value]


def _effort(rows: pd.DataFrame) -> str:
    columns = rows[["status", "duration_s", "phase_s"]]
    spent = effort([dict(zip(columns, row, strict=True)) for row in columns.itertuples(index=False)])
    shares = ", ".join(f"{what} {share:.0%}" for what, share in spent.shares.items())
    return f"{number(spent.wall_s)} s in {counted(spent.num_trials, 'launched trial')}: {shares}" if shares else ""


def _values(values: Any) -> str:
    """Distinct known values in order; empty without any."""
    known = (value for value in values if value is not None and value is not pd.NA)
    # a whole number beside missing ones comes as a float
    return ", ".join(sorted({f"{value:g}" if isinstance(value, float) else str(value) for value in known}))


def _commit(sha: Any, dirty: Any) -> str | None:
    if not isinstance(sha, str):
        return None
    return f"{sha[:12]} with uncommitted changes" if dirty is True else sha[:12]


def _multiset(names: Any) -> str | None:
    present = Counter(str(each) for each in listed(names))
    return " + ".join(f"{n} x {each}" for each, n in sorted(present.items())) or None
