"""Rows -> cells: the replicates of one cell, summarised. A cell's median is the median of its replicates' medians."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from sp_bench.analysis.device_sets import are_several
from sp_bench.analysis.identifiers import (
    EXCHANGE,
    LAUNCH,
    MICRO_BATCHES,
    PROTOCOL,
    Name,
    link_of,
    name_cells,
    setting_identifier,
)
from sp_bench.analysis.statistics import Interval, median_interval
from sp_bench.config.parsing import ConfigError, parse
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import COMPARED, TRAINING
from sp_bench.costs.flags import flags_of_devices, flags_of_loss, flags_of_memory
from sp_bench.costs.step_flags import flags_of_times
from sp_bench.formats import GIB
from sp_bench.rows.consistency import WITH_FLAGS
from sp_bench.rows.names import group_of, library, option_values, pack_seed
from sp_bench.rows.row import MEASURED

GRADIENTS = ("dq", "dk", "dv")
TENSORS = ("output", *GRADIENTS)
# The ledger's phases of a step, without `other`.
PHASES = ("forward", "recompute", "backward", "parameters", "gradients", "optimizer", "loss")
OOM = "oom"
# Parts of a traced step in which a device works, or waits for messages and copies alone
WORK = ("matmul", "attention", "other", "exposed_messages", "exposed_host_copies")
LEAST_WORK = 0.9  # of a step; in one that waits for the host it is less
LEAST_WORK_OF_ATTENTION = 0.8  # whose traced steps, of few ms, differ more from timed ones
NO_LENGTH = (*COMPARED, EXCHANGE)  # workloads without a throughput, memory or limit of a length


class Launch(NamedTuple):
    """Identifies one launch of a cell's processes."""

    campaign: str  # folder
    core_id: str
    replicate: str


@dataclass(frozen=True)
class Communication:
    """Bytes one rank sends off-rank in one step; `phases` maps a phase to (predicted, counted), `other` included."""

    predicted_bytes: float | None
    counted_bytes: float | None
    equal: bool | None  # in every row, in total and per phase and op except `other`; None if one side is unknown
    phases: Mapping[str, tuple[float | None, float | None]]


@dataclass(frozen=True)
class Cell:
    """The options of a cell and the numbers of its rows. Unknown is None, never zero."""

    cell_id: str  # unique on a page: has the environment if several environments have the cell
    pool: str  # its environment: cells of one pool may be compared. Empty with --mix
    name: Name
    asked: Mapping[str, Any]  # the columns that are options
    rows: tuple[Mapping[str, Any], ...]  # last attempts, every status
    step_ms: Mapping[Launch, float]  # median step time of each process launch
    median_step_ms: float | None
    interval_ms: Interval | None  # None also if replicates are of several campaigns or machines
    tokens_per_step: float | None
    attention_flops_per_step: float | None  # over all ranks
    mfu: float | None
    hfu: float | None
    memory_column: str | None  # the column of `memory_bytes`
    memory_bytes: tuple[float, ...]  # per replicate, max over ranks
    communication: Communication
    errors: Mapping[str, tuple[float, float | None]]  # name -> (largest relative error, its budget)

    @property
    def setting(self) -> str:
        """The identifier of the setting; its cells share figures."""
        return self.name.setting

    @property
    def over_fabrics(self) -> str:
        return self.name.over_fabrics

    @property
    def series(self) -> str:
        """The identifier of the series; its cells share a line of a figure."""
        return self.name.series

    @cached_property
    def config(self) -> TrialConfig | None:
        """None if this version has no such trial: options of old rows have changed since, and hands edit others."""
        try:
            return parse(TrialConfig, json.loads((self.measured or self.rows)[-1]["config"] or "null") or {})
        except (ConfigError, ValueError):
            return None

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Path -> requested value of each option."""
        return option_values(self.asked)

    def but(self, *left_out: str) -> tuple[tuple[str, Any], ...]:
        """Its options, sorted, without `left_out` and without how it was measured. A group's name leaves out the group:
        `fabric` stands for fabric.name, fabric.env.NCCL_ALGO ..."""
        return tuple(
            (path, value)
            for path, value in sorted(_of_step(self.options).items())
            if path not in left_out and group_of(path) not in left_out
        )

    @cached_property
    def device_sets(self) -> dict[Launch, int | None]:
        """The set of devices of each replicate, by the keys of `step_ms`."""
        return {key: row["device_set"] for key, row in self.launches.items()}

    @property
    def ran_on(self) -> list[int]:
        """The known sets of devices of the rows, whatever their status."""
        return [row["device_set"] for row in self.rows if row["device_set"] is not None]

    @property
    def env_ids(self) -> list[str]:
        return sorted({str(row["env_id"]) for row in self.rows})

    @property
    def core_ids(self) -> list[str]:
        return sorted({str(row["core_id"]) for row in self.rows})

    @property
    def statuses(self) -> list[str]:
        return sorted({str(row["status"]) for row in self.rows})

    @property
    def ok(self) -> bool:
        """At least one replicate was measured."""
        return self.median_step_ms is not None

    @property
    def out_of_memory(self) -> bool:
        """Whether any replicate ran out of memory. Others may have run, but the cell is not reliable."""
        return OOM in self.statuses

    @property
    def fits(self) -> bool:
        """Whether a replicate ran and none was out of memory. A cell of `workload.fit` has no time, and can fit too."""
        return "ok" in self.statuses and not self.out_of_memory

    @property
    def predicted_gib(self) -> float | None:
        """The memory model's prediction for a device. None on a CPU, whose peak includes the process itself."""
        if self.memory_column != "max_peak_allocated_bytes":
            return None
        known = [row["predicted_peak_bytes"] for row in self.rows if row["predicted_peak_bytes"] is not None]
        return known[0] / GIB if known else None

    @property
    def is_of_a_length(self) -> bool:
        """Whether the cell has a throughput, memory and limits at some length."""
        return self.asked["workload"] not in NO_LENGTH

    @property
    def all_ranks_were_there(self) -> bool:
        """Whether all ranks ran. Only such cells are used in fits and beside published figures."""
        return self.asked["evidence"] == MEASURED

    @property
    def is_comparable(self) -> bool:
        """Whether a ratio, verdict, line or advice may rest on it. One real rank's time may not if the device waits for
        launches, or if it is a lower bound."""
        return self.all_ranks_were_there or not (self.is_lower_bound or self.waits_for_host)

    @property
    def waits_for_host(self) -> bool:
        """Whether the device waits for launches: attention is flagged, or a traced step works for much less than timed
        ones take. The flag alone compares the host's fastest steps, and misses a host whose steps differ."""
        if "host_bound" in self.flags:
            return True
        if self.median_step_ms is None:
            return False
        least = LEAST_WORK if self.asked["workload"] in TRAINING else LEAST_WORK_OF_ATTENTION
        traced = [sum(rank[part] or 0.0 for part in WORK) for row in self.measured for rank in listed(row["kernel_ms"])]
        return bool(traced) and median(traced) < least * self.median_step_ms

    @property
    def is_lower_bound(self) -> bool:
        """Whether the ranks have different work, and the one that ran is the busiest."""
        return "lower_bound" in self.flags

    @property
    def is_library(self) -> bool:
        """Whether the attention is a library's code."""
        return library(self.asked["implementation"]) is not None

    @property
    def link(self) -> str:
        """The link model of one real rank's messages; empty if all ranks are real."""
        return link_of(self.options)

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of one optimizer step."""
        return self.options[MICRO_BATCHES] or 1

    @property
    def micro_batches_note(self) -> str:
        return setting_identifier(MICRO_BATCHES, self.micro_batches) if self.micro_batches > 1 else ""

    @property
    def launch_note(self) -> str:
        launch = self.options[LAUNCH]
        return setting_identifier(LAUNCH, launch) if launch == "cuda_graph" else ""

    @cached_property
    def measured(self) -> list[Mapping[str, Any]]:
        """The rows that have a step time."""
        return _measured(self.rows)

    @cached_property
    def launches(self) -> dict[Launch, Mapping[str, Any]]:
        """The measured rows by the keys of `step_ms`."""
        return {_launch(row): row for row in self.measured}

    def of_launches(self, column: str) -> dict[Launch, float]:
        """A column's value for each launch that has one, by the keys of `step_ms`; the median if the column has
        samples."""
        known = {key: row[column] for key, row in self.launches.items() if row[column] is not None}
        samples = {key: list(v) if isinstance(v, Iterable) else [v] for key, v in known.items()}
        return {key: float(median(each)) for key, each in samples.items() if each}

    def middle(self, column: str) -> float | None:
        """A column's median over the replicates, or over their medians if the column has samples."""
        found = self.of_launches(column)
        return median(found.values()) if found else None

    def largest(self, column: str) -> float | None:
        """A column's largest value over the replicates."""
        return max((row[column] for row in self.measured if row[column] is not None), default=None)

    @cached_property
    def doubts(self) -> dict[Launch, set[str]]:
        """Doubts about the measured rows, by the keys of `step_ms`."""
        return {key: _doubts_of(row, self.processor) for key, row in self.launches.items()}

    @property
    def flags(self) -> list[str]:
        """Doubts about the measured rows, by name."""
        return sorted(set().union(*self.doubts.values()))

    @property
    def num_unsampled(self) -> int:
        """The number of rows from before gradients were checked at the timed length. Rows of one real rank do not
        count: other rows prove them."""
        if not self.all_ranks_were_there:
            return 0
        with_gradients = {"attention": "forward_backward", "train_step": "step"}
        if with_gradients.get(self.asked["workload"]) != self.asked["pass_kind"]:
            return 0
        return sum(row["sampled_grad_error"] is None for row in self.measured)

    @property
    def throttled(self) -> list[str]:
        """The reasons that throttled a device of any rank and replicate: power and temperature."""
        states = [state for row in self.measured for state in listed(row["device_state"])]
        reasons = {str(reason) for state in states for reason in listed(state["throttle_reasons"])}
        return sorted(r for r in reasons if any(word in r.lower() for word in ("power", "thermal")))

    @property
    def throttle_note(self) -> str:
        return f"throttled: {', '.join(self.throttled)}" if self.throttled else ""

    @property
    def processor(self) -> str:
        """What a rank runs on."""
        return "GPU" if self.options.get("hardware.device") == "cuda" else "rank"


def cells(rows: pd.DataFrame, names: Mapping[str, Name] | None = None) -> list[Cell]:
    """All cells of a selection's rows, ordered by setting, sp_size, seq_len and series, whatever the rows' order.
    names: of each cell_id, among more cells than these; None: they are named among themselves."""
    if rows.empty:
        return []
    rows = rows.assign(cell_id=rows["cell_id"].fillna(rows["trial_id"]))
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in known_rows(rows.sort_values(["replicate", "file"])):
        grouped.setdefault((row["cell_id"], row["pool"]), []).append(row)
    named = [names[cell_id] for cell_id, _ in grouped] if names else name_cells([rows[0] for rows in grouped.values()])
    num_pools = Counter(cell_id for cell_id, _ in grouped)
    ids = [cell_id if num_pools[cell_id] == 1 else f"{cell_id} {pool}" for cell_id, pool in grouped]
    return sorted(map(_cell, ids, named, grouped.values()), key=_order)


def of_equal_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, with one cell_id for all cells that compute the same step. How a step is measured, such as
    `attribution` or the number of timed steps, does not distinguish cells; its pack of documents does. Rows of one
    launch stay apart, since they are no replicates of each other. A row that only tested the fit has no time, so it
    joins the cell."""
    if rows.empty:
        return rows
    rows = rows.assign(cell_id=rows["cell_id"].fillna(rows["trial_id"]))
    first: dict[str, list[Any]] = {}
    untimed = set()
    for row in known_rows(rows.drop_duplicates(["cell_id", "pool"])):
        step = _of_step(options := option_values(row))
        key = repr((row["pool"], row["implementation"], row["method_source"], sorted(step.items(), key=str)))
        first.setdefault(key, []).append(row["cell_id"])
        untimed |= {row["cell_id"]} if options["workload.fit"] else set()
    launches: dict[str, set[tuple[Any, ...]]] = {}
    for cell_id, *launch in zip(*(rows[name] for name in ("cell_id", "folder", "core_id", "replicate")), strict=True):
        launches.setdefault(cell_id, set()).add(tuple(launch))
    same: dict[str, str] = {}
    for ids in first.values():
        timed = [i for i in ids if i not in untimed]
        all_differ = len(set().union(*(launches[i] for i in timed))) == sum(len(launches[i]) for i in timed)
        apart = ids[:1] if all_differ else timed
        same |= {i: apart[0] for i in ids if i not in apart}
    return rows.assign(cell_id=rows["cell_id"].map(lambda cell_id: same.get(cell_id, cell_id)))


def _of_step(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those of measuring. The seed stays if documents are drawn from it."""
    drawn = pack_seed(options) is not None
    return {path: value for path, value in options.items() if path not in PROTOCOL or (drawn and path == "seed")}


class _Columns(dict[str, list[Any]]):
    """The columns of some rows, each converted when a row's value is first read: most never are."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows

    def __missing__(self, name: str) -> list[Any]:
        self[name] = [_known(value) for value in self.rows[name].tolist()]
        return self[name]


class _Row(Mapping[str, Any]):
    """One row of some columns. A dictionary for each of 100,000 would take 1 GB."""

    __slots__ = ("_columns", "_place")

    def __init__(self, columns: _Columns, place: int) -> None:
        self._columns, self._place = columns, place

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._place]

    def __iter__(self) -> Iterator[str]:
        return map(str, self._columns.rows)

    def __len__(self) -> int:
        return self._columns.rows.shape[1]


def known_rows(rows: pd.DataFrame) -> list[Mapping[str, Any]]:
    """Each row as column -> value; None for any kind of missing value."""
    columns = _Columns(rows)
    return [_Row(columns, place) for place in range(len(rows))]


def _order(cell: Cell) -> tuple[Any, ...]:
    sizes = (-1 if cell.asked[name] is None else cell.asked[name] for name in ("sp_size", "seq_len"))
    return (cell.setting, *sizes, cell.series, cell.cell_id)


def _known(value: Any) -> Any:
    """The value; None for any kind of missing value and for NaN."""
    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


_ERRORS = {tensor: f"rel_error_{tensor}" for tensor in TENSORS} | {
    "sampled output": "sampled_rel_error",
    "loss": "rel_error_loss",
    "gradient norm": "rel_error_grad_norm",
    "NLL difference, nats": "max_nll_difference",
}


def _measured(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    # A time of zero is no measurement: no rate can come from it.
    return [row for row in rows if row["status"] == "ok" and (row["median_step_ms"] or 0) > 0]


def _doubts_of(row: Mapping[str, Any], processor: str) -> set[str]:
    """The flags of a measured row, also those that it is too old to have. processor: as `Cell.processor`."""
    of_samples = []
    if (row["schema_version"] or 0) < WITH_FLAGS:
        stage_ends = listed(row["stage_ends"])
        of_samples += flags_of_times(listed(row["step_ms"]), listed(row["window_ms"]), stage_ends)
        of_samples += flags_of_loss(listed(row["loss"]), stage_ends)
    return {
        *map(str, listed(row["flags"])),
        *of_samples,
        *(flags_of_devices(row["device_state"], row["limit_ms"]) if processor == "GPU" else ()),
        *flags_of_memory(row["device_memory_gib"], row["device_used_bytes"], row["allocator_retries"]),
    }


def narrowed(cell: Cell, keys: Collection[Launch]) -> Cell:
    """The cell as these replicates alone would make it."""
    rows = [row for key, row in cell.launches.items() if key in keys]
    return cell if len(rows) == len(cell.measured) else _cell(cell.cell_id, cell.name, rows)


def _launch(row: Mapping[str, Any]) -> Launch:
    return Launch(str(row["folder"]), str(row["core_id"]), str(row["replicate"]))


def _cell(cell_id: str, name: Name, rows: Sequence[Mapping[str, Any]]) -> Cell:
    measured = _measured(rows)
    step_ms = {_launch(row): row["median_step_ms"] for row in measured}
    middle = median(step_ms.values()) if step_ms else None
    on_several = are_several(row["device_set"] for row in measured) or len({row["folder"] for row in measured}) > 1
    ran = [row for row in rows if row["status"] == "ok"]  # those of `workload.fit` too, which have no time
    memory_column = next(
        (c for c in ("max_peak_allocated_bytes", "max_peak_host_bytes") if any(row[c] is not None for row in ran)), None
    )
    mfu_ms, hfu_ms = _per_step(measured, "mfu"), _per_step(measured, "hfu")
    tokens_ms, flops_ms = _per_step(measured, "tokens_per_s"), _per_step(measured, "attention_flops_per_s")
    return Cell(
        cell_id=cell_id,
        pool=rows[0]["pool"],
        name=name,
        asked=rows[0],
        rows=tuple(rows),
        step_ms=step_ms,
        median_step_ms=middle,
        interval_ms=None if on_several else median_interval(list(step_ms.values())),
        tokens_per_step=None if tokens_ms is None else tokens_ms / 1e3,
        attention_flops_per_step=None if flops_ms is None else flops_ms / 1e3,
        mfu=mfu_ms / middle if mfu_ms is not None and middle else None,
        hfu=hfu_ms / middle if hfu_ms is not None and middle else None,
        memory_column=memory_column,
        memory_bytes=tuple(row[memory_column] for row in ran if memory_column and row[memory_column] is not None),
        communication=_communication(measured),
        errors=_errors(measured),
    )


def _per_step(measured: Sequence[Mapping[str, Any]], rate: str) -> float | None:
    """A rate times its step time: the work of one step, equal in all replicates up to rounding."""
    work = [row[rate] * row["median_step_ms"] for row in measured if row[rate] is not None]
    return median(work) if work else None


def _communication(measured: Sequence[Mapping[str, Any]]) -> Communication:
    known = [r for r in measured if r["comm_predicted_bytes"] is not None and r["comm_counted_bytes"] is not None]
    shown = (known or measured or [{}])[-1]
    phases: dict[str, tuple[float | None, float | None]] = {}
    for entry in listed(shown.get("comm")):
        phase, predicted, counted = str(entry["phase"]), entry["predicted_bytes"], entry["counted_bytes"]
        before = phases.get(phase, (None, None))
        phases[phase] = (_add(before[0], predicted), _add(before[1], counted))
    return Communication(
        predicted_bytes=shown.get("comm_predicted_bytes"),
        counted_bytes=shown.get("comm_counted_bytes"),
        equal=all(map(_equal_bytes, known)) if known else None,
        phases=phases,
    )


def listed(value: Any) -> list[Any]:
    """A column's list; empty if unknown."""
    return [] if value is None else list(value)


def _add(total: float | None, more: float | None) -> float | None:
    return total if more is None else more + (total or 0.0)


def _equal_bytes(row: Mapping[str, Any]) -> bool:
    entries = [e for e in listed(row["comm"]) if e["phase"] != "other"]
    return row["comm_predicted_bytes"] == row["comm_counted_bytes"] and all(
        (e["predicted_bytes"] or 0.0) == (e["counted_bytes"] or 0.0) for e in entries
    )


def _errors(measured: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float | None]]:
    """Each tensor's largest error over the replicates, with the budget of that row."""
    largest: dict[str, tuple[float, float | None]] = {}
    for name, column in _ERRORS.items():
        known = [row for row in measured if row[column] is not None]
        if known:
            row = max(known, key=itemgetter(column))
            largest[name] = (row[column], (row["error_budget"] or {}).get(name))
    for kind, column in (("sampled", "sampled_grad_error"), ("identity", "identity_error")):
        for row in measured:
            for tensor, error in (row[column] or {}).items():
                name = f"{kind} {tensor}"
                if error is not None and (name not in largest or error > largest[name][0]):
                    largest[name] = (error, None)
    return largest
