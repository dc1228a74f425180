"""The appendix of a page: every row, what failed and why, further columns of every cell, and where rows come from."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice
from statistics import fmean, median
from typing import Any, NamedTuple

import pandas as pd

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell, listed
from sp_bench.analysis.device_sets import several
from sp_bench.analysis.effort import COLUMNS, effort
from sp_bench.analysis.metrics import nearest_error
from sp_bench.analysis.pattern_bytes import PatternBytes, pattern_bytes
from sp_bench.analysis.selection import Selection
from sp_bench.analysis.statistics import Interval
from sp_bench.analysis.time_parts import Attribution, Part, attributions
from sp_bench.config.workload import COMPARED
from sp_bench.formats import MISSING, counted, in_bytes, number, span, whole
from sp_bench.hardware import public_value
from sp_bench.report import held_tables
from sp_bench.report.published import beside
from sp_bench.report.table import Column, Table, plain
from sp_bench.rows import git

NAMED = ("hostname", "cpu", "cpu_cores", "driver", "cuda", "cudnn", "nccl", "process_group", "python", "topology")
MAX_REASON = 2000  # characters of one reason; the row holds the rest
MAX_LINES = 1000  # of one table


class Numbers:
    """The number of each cell on a page, from 1: a table's line links to the rows of its cell."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._numbers = {cell.cell_id: number for number, cell in enumerate(cells, 1)}

    def __call__(self, cell: Cell) -> int:
        return self._numbers[cell.cell_id]


def appendix(cells: Sequence[Cell], numbers: Numbers) -> list[Table[Any]]:
    """The tables that have lines."""
    made: tuple[Table[Any], ...] = (
        _failures(cells),
        plain("Every cell", ABOUT_CELLS, (Column("cell", numbers), *CELL), cells),
        plain("Parts of a step", ABOUT_PARTS, PARTS, attributions(cells)),
        plain("Bytes of libraries", "", BYTES, _bytes(cells)),
        plain("Messages alone", "Bytes one rank sends off-rank a second.", MESSAGES, _of("collective", cells)),
        training(cells),
        parity(cells),
        stages(cells),
        batches(cells),
        beside(cells),
        *held_tables.tables(cells),
        device(cells),
    )
    return [*(_cut(table) for table in made if table.lines), _rows(cells, numbers)]


def _cut(table: Table[Any]) -> Table[Any]:
    if len(table.lines) <= MAX_LINES:
        return table
    about = f"{table.about} The first {MAX_LINES:,} of {len(table.lines):,} lines; the rows hold the others."
    return plain(table.title, about.strip(), table.columns, table.lines[:MAX_LINES])


def _of(workload: str, cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.ok and cell.asked["workload"] == workload]


def name(cell: Cell) -> str:
    return ", ".join(filter(None, [words.method(cell), words.place(cell)]))


@dataclass(frozen=True)
class Failure:
    """Attempts with one reason for their failure."""

    status: str
    phase: str
    reason: str
    cells: tuple[Cell, ...]  # of each attempt

    @property
    def what(self) -> str:
        named = list(dict.fromkeys(map(name, self.cells)))
        return "; ".join(named[:4]) + (f"; and {len(named) - 4} more" if len(named) > 4 else "")


FAILURES: tuple[Column[Failure], ...] = (
    Column("status", lambda failure: failure.status),
    Column("phase", lambda failure: failure.phase),
    Column("trials", lambda failure: len(failure.cells)),
    Column("what", lambda failure: failure.what),
    Column("reason", lambda failure: failure.reason),
)


def _failures(cells: Sequence[Cell]) -> Table[Failure]:
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
    found = [Failure(*key, tuple(group)) for key, group in grouped.items()]
    found.sort(key=lambda each: (each.status, -len(each.cells), each.phase, each.reason))
    return plain("Not ok: what failed and why", "", FAILURES, found)


def _interval(interval: Interval) -> str:
    return f"[{number(interval.low)}, {number(interval.high)}]"


ABOUT_CELLS = "Every cell by its identifiers. Error: the tensor nearest to its budget, as a share of it."
CELL: tuple[Column[Cell], ...] = (
    Column("setting", lambda cell: cell.setting),
    Column("series", lambda cell: cell.series),
    Column("sp_size", lambda cell: cell.asked["sp_size"], whole),
    Column("seq_len", lambda cell: cell.asked["seq_len"], whole),
    Column("replicates ok", lambda cell: f"{len(cell.step_ms)} of {len(cell.rows)}"),
    Column("step (ms)", lambda cell: cell.median_step_ms, number),
    Column("interval (ms)", lambda cell: cell.interval_ms, _interval),
    Column("coverage", lambda cell: cell.interval_ms, lambda interval: f"{interval.coverage:.1%}"),
    Column("HFU", lambda cell: cell.hfu, "{:.1%}".format),
    Column("bytes predicted", lambda cell: cell.communication.predicted_bytes, in_bytes),
    Column("bytes counted", lambda cell: cell.communication.counted_bytes, in_bytes),
    Column("on the wire", lambda cell: cell.middle("comm_wire_bytes"), in_bytes),
    Column("error / budget", nearest_error, lambda nearest: "{:.2f} ({})".format(*nearest)),
    Column("flags", lambda cell: ", ".join(filter(None, [*cell.flags, cell.throttle_note]))),
)

ABOUT_PARTS = (
    "Where the time of an attention step goes. Arms are the same step timed without messages, and without kernels."
)


def _part(head: str, read: Callable[[Attribution], Part | None]) -> Column[Attribution]:
    return Column(head, read, lambda part: part.words)


PARTS: tuple[Column[Attribution], ...] = (
    Column("what", lambda of: name(of.cell)),
    Column("kernel", lambda of: words.kernel(of.cell)),
    Column("step (ms)", lambda of: of.cell.median_step_ms, number),
    Column("kernel alone (ms)", lambda of: of.alone_ms, number),
    Column("of its speed", lambda of: of.fraction_words),
    _part("computing beyond it (ms)", lambda of: of.beyond_kernel),
    _part("imbalance (ms)", lambda of: of.imbalance),
    _part("exposed messages (ms)", lambda of: of.exposed),
    Column("messages alone (ms)", lambda of: of.comm_only_ms, number),
    Column("overlap efficiency", lambda of: of.overlap_efficiency, "{:.2f}".format),
    Column("unsettled arms", lambda of: ", ".join(of.unsettled_arms)),
)

BYTES: tuple[Column[tuple[Cell, PatternBytes]], ...] = (
    Column("what", lambda of: name(of[0])),
    Column("our method of its kind", lambda of: of[1].pattern),
    Column("its closed form", lambda of: of[1].closed_form, in_bytes),
    Column("counted", lambda of: of[1].counted, in_bytes),
    Column("ratio", lambda of: of[1].ratio, "{:.3f}x".format),
    Column("what the difference is", lambda of: _reasons(of[1]) or "none"),
)


def _bytes(cells: Sequence[Cell]) -> list[tuple[Cell, PatternBytes]]:
    """(library, how its bytes differ from those of our method of its kind)."""
    libraries = [cell for cell in cells if cell.ok and cell.is_library]
    return [(cell, found) for cell in libraries if (found := pattern_bytes(cell)) is not None]


def _reasons(found: PatternBytes) -> str:
    return "; ".join(f"{reason}: {in_bytes(size)}" for reason, size in found.reasons.items())


def _largest_bytes_per_s(cell: Cell) -> float:
    return (cell.communication.counted_bytes or 0.0) / (cell.median_step_ms or 1.0) * 1e3


def _per_s(rate: float) -> str:
    return f"{in_bytes(rate)}/s"


MESSAGES: tuple[Column[Cell], ...] = (
    Column("primitive", lambda cell: cell.series),
    Column("fabric", lambda cell: words.fabric(cell.asked["fabric"])),
    Column("ranks", lambda cell: cell.asked["sp_size"], whole),
    Column("largest message", _largest_bytes_per_s, _per_s),
    Column(
        "slope of all sizes", lambda c: c.middle("bandwidth_bytes_per_s"), _per_s, absent=lambda cell: f"{MISSING}/s"
    ),
    Column("latency (\N{MICRO SIGN}s)", lambda cell: cell.middle("latency_us"), number),
)

LOADED = {"before": "before the first step", "in_step": "in each step"}
CHECKED = {"method": "method and step", "step_only": "step only", None: MISSING}


@dataclass(frozen=True)
class Checked:
    """Training steps of one stack."""

    engine: str
    method: str
    kernel: str
    dtype: str
    loaded: str
    checked: str
    cells: tuple[Cell, ...] = ()

    def worst(self, column: str) -> Mapping[str, Any]:
        """The largest error over the cells' rows, and its parameter; empty if nothing was compared."""
        found = [row[column] for cell in self.cells for row in cell.measured if row[column] is not None]
        return max(found, key=lambda each: each["error"], default={})


TRAINING: tuple[Column[Checked], ...] = (
    Column("engine", lambda of: of.engine),
    Column("method", lambda of: of.method),
    Column("kernel", lambda of: of.kernel),
    Column("dtype", lambda of: of.dtype),
    Column("tokens are loaded", lambda of: of.loaded),
    Column("worst gradient (relative)", lambda of: of.worst("grad_error").get("error"), number),
    Column("its parameter", lambda of: of.worst("grad_error").get("parameter")),
    Column("also checked in float32", lambda of: of.checked),
    Column("worst gradient there (relative)", lambda of: of.worst("fp32_grad_error").get("error"), number),
    Column("update off by (roundings)", lambda of: of.worst("update_error").get("error"), number),
)


def training(cells: Sequence[Cell]) -> Table[Checked]:
    """The checks before training steps were timed, and the sources of their tokens."""
    groups: dict[Checked, list[Cell]] = {}
    for cell in _of("train_step", cells):
        loaded = {LOADED.get(row["batch_loading"], "not recorded") for row in cell.measured}
        checked = {CHECKED.get(row["fp32_proof"], str(row["fp32_proof"])) for row in cell.measured}
        stack = (str(cell.asked["engine"]), words.method(cell), words.kernel(cell), str(cell.asked["dtype"]))
        groups.setdefault(Checked(*stack, " or ".join(sorted(loaded)), " or ".join(sorted(checked))), []).append(cell)
    found = [replace(of, cells=tuple(group)) for of, group in sorted(groups.items(), key=lambda item: astuple(item[0]))]
    about = f"At a reduced length and with two layers, against one process. {MISSING}: not compared, as in older rows."
    return plain("What was checked of training steps", about, TRAINING, found)


def _largest(head: str, column: str, *, optional: bool = False) -> Column[Cell]:
    return Column(head, lambda cell: cell.largest(column), "{:.1e}".format, optional=optional)


PARITY: tuple[Column[Cell], ...] = (
    Column("what", name),
    Column("engine", lambda cell: cell.asked["engine"]),
    _largest("largest NLL difference (nats)", "max_nll_difference"),
    _largest("of the control in FP8", "control_nll_difference", optional=True),
    _largest("mean (nats)", "mean_nll_difference"),
    _largest("gradient norm, relative", "max_grad_norm_difference"),
)


def parity(cells: Sequence[Cell]) -> Table[Cell]:
    found = [cell for workload in COMPARED for cell in _of(workload, cells)]
    return plain("Training parity, against one process", "", PARITY, found)


class Stage(NamedTuple):
    """A stage of one row of `workload=stream`."""

    cell: Cell
    of: Mapping[str, Any]  # of the column `stage_ends`
    times: Mapping[str, Any]  # of `stage_times`; empty: the row has no times
    loss_error: float | None  # of `stage_loss_errors`, where it meets the stage before; None: the first, or fp32
    compute_only_ms: float | None  # median of all steps but the first without messages; None: not timed, or one step

    @property
    def change_ms(self) -> float | None:
        """What the first step takes longer than the others; None: unknown, or there are no others."""
        others = self.times.get("median_step_ms")
        return None if others is None else self.times["first_step_ms"] - others

    @property
    def exposed_ms(self) -> float | None:
        others = self.times.get("median_step_ms")
        return None if others is None or self.compute_only_ms is None else others - self.compute_only_ms


STAGES: tuple[Column[Stage], ...] = (
    Column("what", lambda stage: name(stage.cell)),
    Column("model", lambda stage: f"{words.model(stage.cell)}, {words.dtype(stage.cell)}"),
    Column("tokens", lambda stage: whole(stage.of["seq_len"])),
    Column("steps", lambda stage: whole(stage.of["num_steps"])),
    Column("first step (ms)", lambda stage: stage.times.get("first_step_ms"), number),
    Column("median of the others (ms)", lambda stage: stage.times.get("median_step_ms"), number),
    Column("change (ms)", lambda stage: stage.change_ms, number),
    Column("exposed messages (ms)", lambda stage: stage.exposed_ms, number),
    Column("tokens/s", lambda stage: stage.times.get("tokens_per_s"), whole),
    Column("reserved at its end", lambda stage: stage.of["reserved_bytes"], in_bytes),
    Column("compiled, times", lambda stage: whole(stage.of["compiled"])),
    Column("compiled, s", lambda stage: stage.of["compile_s"], number),
    Column("losses off the stage before", lambda stage: stage.loss_error, number),
)


def stages(cells: Sequence[Cell]) -> Table[Stage]:
    """The stages of each row, in their order."""
    found = []
    for cell in _of("stream", cells):
        for row in (row for row in cell.measured if not listed(row["batches"])):
            of, times = listed(row["stage_ends"]), listed(row["stage_times"])
            errors = [None, *(listed(row["stage_loss_errors"]) or [None] * len(of))]
            computing = iter(listed(row["compute_only_step_ms"]))
            alone = [[*islice(computing, each["num_steps"])][1:] for each in of]  # without the first, as in `times`
            found += [
                Stage(cell, each, times[i] if times else {}, errors[i], median(alone[i]) if alone[i] else None)
                for i, each in enumerate(of)
            ]
    about = (
        "One process, one model, one optimizer. A change is the first step less the median of the others: it has what "
        "compiles anew in it. Exposed messages (workload.attribution) are that median less the same without messages. "
        "Losses are of the same tokens and weights at the lengths of both stages."
    )
    return plain("Stage by stage", about, STAGES, found)


class Stream(NamedTuple):
    """A row of `workload=stream` whose documents are drawn."""

    cell: Cell
    row: Mapping[str, Any]

    def of_batches(self, name: str) -> list[float]:
        return [each[name] for each in listed(self.row["batches"])]


BATCHES: tuple[Column[Stream], ...] = (
    Column("what", lambda stream: name(stream.cell)),
    Column("groups", lambda stream: words.policy(stream.cell)),
    Column("model", lambda stream: f"{words.model(stream.cell)}, {words.dtype(stream.cell)}"),
    Column("batches", lambda stream: whole(len(listed(stream.row["batches"])))),
    Column("documents a batch", lambda stream: fmean(stream.of_batches("documents")), number),
    Column("passes a batch", lambda stream: fmean(stream.of_batches("passes")), number),
    Column("work of the busiest rank", lambda stream: fmean(stream.of_batches("imbalance")), "{:.2f}x".format),
    Column("median batch (ms)", lambda stream: stream.row["median_step_ms"], number),
    Column("exposed messages (ms)", lambda stream: stream.row["exposed_comm_ms"], number),
    Column("imbalance (ms)", lambda stream: stream.row["imbalance_ms"], number),
    Column("tokens/s of all batches", lambda stream: stream.row["window_tokens_per_s"], whole),
)


def batches(cells: Sequence[Cell]) -> Table[Stream]:
    """Batches of drawn documents, a line a row."""
    rows = [Stream(cell, row) for cell in _of("stream", cells) for row in cell.measured if listed(row["batches"])]
    about = (
        "Work is predicted, over the mean of all ranks, in the mean over the batches. Measured with "
        "workload.attribution: exposed messages are the median batch less the median without messages, which is that "
        "of the slowest rank; imbalance is what that is above the mean rank's."
    )
    return plain("Batches of drawn documents", about, BATCHES, rows)


def _states(cell: Cell) -> list[Mapping[str, Any]]:
    return [state for row in cell.measured for state in listed(row["device_state"])]


def _span(head: str, read: Callable[[Cell], Iterable[float | None]]) -> Column[Cell]:
    """A column: the smallest to the largest value over ranks and replicates."""

    def of_cell(cell: Cell) -> str | None:
        known = [value for value in read(cell) if value is not None]
        return span(known, number) if known else None

    return Column(head, of_cell)


DEVICE: tuple[Column[Cell], ...] = (
    Column("what", name),
    Column("kernel", words.kernel),
    _span("SM clock (MHz)", lambda cell: (state["sm_clock_mhz"] for state in _states(cell))),
    _span("power (W)", lambda cell: (state["power_w"] for state in _states(cell))),
    _span("temperature (C)", lambda cell: (state["temperature_c"] for state in _states(cell))),
    _span("energy a step (J)", lambda cell: (joules for row in cell.measured for joules in listed(row["energy_j"]))),
    Column("throttled by", lambda cell: ", ".join(cell.throttled)),
    Column("host, a launch (\N{MICRO SIGN}s)", lambda cell: cell.middle("host_launch_us"), number),
)


def device(cells: Sequence[Cell]) -> Table[Cell]:
    about = "Ranges over ranks and replicates."
    return plain("The devices while they worked", about, DEVICE, filter(_states, cells))


@dataclass(frozen=True)
class Row:
    """One row of a cell."""

    number: int
    cell: Cell
    row: Mapping[str, Any]
    is_first: bool


ROWS: tuple[Column[Row], ...] = (
    Column("cell", lambda of: f"{of.number}: {of.cell.series}, {words.place(of.cell)}" if of.is_first else ""),
    Column("trial_id", lambda of: of.row["trial_id"]),
    Column("replicate", lambda of: of.row["replicate"]),
    Column("status", lambda of: of.row["status"]),
    Column("median step (ms)", lambda of: of.row["median_step_ms"], number),
    Column("file", lambda of: of.row["file"]),
)


def _rows(cells: Sequence[Cell], numbers: Numbers) -> Table[Row]:
    found = [Row(numbers(cell), cell, row, row is cell.rows[0]) for cell in cells for row in cell.rows]
    about = "What the lines of the tables link to."
    return plain("Rows", about, ROWS, found, anchor=lambda of: f"c{of.number}" if of.is_first else "")


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
    """(name, its distinct values over the rows)."""
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
    facts.append(
        ("libraries", _values(" ".join(map(str, each)) for e in environments for each in listed(e.get("packages"))))
    )
    variables = {each for e in environments for each in listed(e.get("env")) if None not in each}
    facts.append(("variables", _values(f"{name} {public_value(name, value)}" for name, value in variables)))
    return [(what, value) for what, value in facts if value]


def _effort(rows: pd.DataFrame) -> str:
    columns = rows[list(COLUMNS)]
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
    return f"{git.short(sha, 12)} with uncommitted changes" if dirty is True else git.short(sha, 12)


def _multiset(names: Any) -> str | None:
    present = Counter(str(each) for each in listed(names))
    return " + ".join(f"{n} x {each}" for each, n in sorted(present.items())) or None
