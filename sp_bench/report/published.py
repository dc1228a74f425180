"""Published figures, from published.yaml, beside our fastest cells with the same columns. This is context, no
comparison of like with like."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.held import held, largest_error
from sp_bench.analysis.identifiers import OPTIMIZER_OFFLOAD
from sp_bench.analysis.metrics import memory_gib, tflops, tokens_per_s, tokens_per_s_per_gpu
from sp_bench.analysis.over_depth import OverDepth, over_depth
from sp_bench.config.machine import NO_DELAY
from sp_bench.config.yaml_text import read_yaml
from sp_bench.formats import GIB, number, whole
from sp_bench.report.table import Column, Table, plain
from sp_bench.rows.schema import SCHEMA

FILE = "published.yaml"
OOM = "OOM"
ABOUT = (
    "Context, no comparison of like with like: measured is our fastest cell of the same workload, model or heads, "
    "length, method and number of devices, or the longest that fits."
)


def _memory_gb(cell: Cell) -> float | None:
    held = memory_gib(cell) if cell.memory_column == "max_peak_allocated_bytes" else None
    return None if held is None else held * GIB / 1e9


METRICS: Mapping[
    str, tuple[str, Callable[[Cell], float | None]]
] = {  # metric -> its unit, and how to read it from a cell
    "tokens_per_s": ("tokens/s", tokens_per_s),
    "tokens_per_s_per_gpu": ("tokens/s/GPU", tokens_per_s_per_gpu),
    "tflops_per_gpu": ("TFLOP/s/GPU", tflops),
    "step_s": ("step, s", lambda cell: cell.median_step_ms and cell.median_step_ms / 1e3),
    "peak_memory_gb": ("peak GB/GPU", _memory_gb),
    "mean_nll_difference": ("mean NLL difference, nats", lambda cell: cell.largest("mean_nll_difference")),
    "max_nll_difference": ("largest NLL difference, nats", lambda cell: cell.largest("max_nll_difference")),
    "max_seq_len": ("longest seq_len, tokens", lambda cell: cell.asked["seq_len"] if cell.fits else None),
}


@dataclass(frozen=True)
class Published:
    source: str
    stack: str
    metric: str
    value: float | str
    where: Mapping[str, Any]  # column -> value that our cells must have
    reading: str = ""

    @property
    def words(self) -> str:
        length = f"{whole(self.where['seq_len'])} tokens" if "seq_len" in self.where else ""
        by = words.METHODS.get(self.where.get("method", ""), "")
        return ", ".join(filter(None, (METRICS[self.metric][0], by, length, self.reading)))


def steps_like(cell: Cell) -> list[Published]:
    """Published steps of the cell's model, length, ranks, method and options, at whatever depth the cell ran."""
    of = {**cell.asked, "num_layers": None}
    return [
        each
        for each in figures()
        if each.metric == "step_s" and {**each.where, "num_layers": None}.items() <= of.items()
    ]


@dataclass(frozen=True)
class Beside:
    published: Published
    cell: Cell

    @property
    def measured(self) -> float | None:
        return METRICS[self.published.metric][1](self.cell)

    @property
    def ratio(self) -> float | None:
        theirs, ours = self.published.value, self.measured
        return ours / theirs if ours is not None and not isinstance(theirs, str) else None


COLUMNS: tuple[Column[Beside], ...] = (
    Column("source", lambda of: of.published.source),
    Column("its stack", lambda of: of.published.stack),
    Column("figure", lambda of: of.published.words),
    Column("published", lambda of: of.published.value, lambda value: value if value == OOM else f"{value:,}"),
    Column("measured", lambda of: of.measured, number, absent=lambda of: OOM),
    Column("ratio", lambda of: of.ratio, "{:.2f}".format),
    Column("measured with", lambda of: _with(of.cell)),
)


def _with(cell: Cell) -> str:
    offloaded = words.unusual(cell, OPTIMIZER_OFFLOAD)
    parts = (words.method(cell), words.kernel(cell), cell.asked["engine"], cell.micro_batches_note, offloaded)
    return ", ".join(filter(None, (*parts, words.processors(cell), str(cell.asked["hardware"]).upper())))


@cache
def figures() -> tuple[Published, ...]:
    """All figures of published.yaml. Keys that are no field of a figure are columns of rows.

    Raises:
        ValueError: a metric or a column that does not exist.
    """
    found = []
    for source in read_yaml(files("sp_bench.report").joinpath(FILE).read_text("utf-8"), FILE):
        for figure in source["figures"]:
            own = {name: figure[name] for name in ("metric", "value", "reading") if name in figure}
            where = source["where"] | {name: value for name, value in figure.items() if name not in own}
            if unknown := sorted({own["metric"], *where} - {*METRICS, *SCHEMA.names}):
                raise ValueError(f"{source['source']}: neither metrics nor columns: {', '.join(unknown)}")
            found.append(Published(source["source"], source["stack"], where=where, **own))
    return tuple(found)


def beside(cells: Sequence[Cell]) -> Table[Beside]:
    """A table of the published figures that have a matching cell of ours."""
    found = [Beside(figure, cell) for figure in figures() if (cell := _ours(figure, cells)) is not None]
    return plain("Beside published figures", ABOUT, COLUMNS, found)


@dataclass(frozen=True)
class BesideOneRank:
    """A published figure beside a cell of one real rank, or beside a whole step by the line over layers."""

    published: Published
    cell: Cell
    one_rank: float
    error: float | None  # the largest relative error of cells of its workload that rows of all ranks check
    line: OverDepth | None

    @property
    def ratio(self) -> float | None:
        return None if isinstance(self.published.value, str) else self.one_rank / self.published.value

    @property
    def is_within(self) -> bool | None:
        """Whether the ratio differs from 1 by no more than the held error. None for memory, which rows check apart, and
        if the kernels may differ."""
        apart = self.published.metric == "peak_memory_gb" or "kernel" not in self.published.where
        if self.ratio is None or self.error is None or apart:
            return None
        return abs(self.ratio - 1) <= self.error

    @property
    def how(self) -> str:
        depth = "{} and {} layers, by their line".format(*self.line.num_layers_run) if self.line else ""
        return ", ".join(filter(None, [_with(self.cell), self.cell.link, depth]))


OF_LINES: Mapping[str, Callable[[OverDepth], float | None]] = {  # metrics that a line over layers gives
    "step_s": lambda line: line.step_ms / 1e3,
    "tokens_per_s_per_gpu": lambda line: line.tokens_per_s_per_gpu,
    "peak_memory_gb": lambda line: line.peak_gib and line.peak_gib * GIB / 1e9,
}

ONE_RANK: tuple[Column[BesideOneRank], ...] = (
    Column("source", lambda of: of.published.source),
    Column("its stack", lambda of: of.published.stack),
    Column("figure", lambda of: of.published.words),
    Column("GPUs", lambda of: of.cell.asked["world_size"]),
    Column("hosts", lambda of: of.cell.asked["num_nodes"] or 1),
    Column("published", lambda of: of.published.value, lambda value: f"{value:,}"),
    Column("predicted", lambda of: of.one_rank, number),
    Column("ratio", lambda of: of.ratio, "{:.2f}".format),
    Column("within the held error", lambda of: of.is_within, lambda within: "yes" if within else "no"),
    Column("by", lambda of: of.how),
)


def beside_one_rank(cells: Sequence[Cell]) -> Table[BesideOneRank]:
    """Each published figure of which cells of one real rank have the columns; for a step of all layers, two of few."""
    helds, lines = held(cells), over_depth(cells)
    found = []
    for figure in figures():
        for cell, line, value in _of_one_rank(figure, cells, lines):
            found.append(BesideOneRank(figure, cell, value, largest_error(helds, cell.asked["workload"]), line))
    errors = {words.workload(each.cell).lower(): each.error for each in found if each.is_within is not None}
    stated = ", ".join(f"{workload} {error:.1%}" for workload, error in errors.items())
    about = f"{OF_ONE_RANK} Held error: {stated}." if stated else OF_ONE_RANK
    return plain("One real rank beside published figures", about, ONE_RANK, found)


OF_ONE_RANK = (
    "Figures of others at 8 GPUs or more, beside one real rank of as many, equal in what the figure names: model, "
    "length, what is recomputed. Only one that names our kernel is judged by the held error. Theirs are of H100s, ours "
    "of an H200, which computes as fast. The held error is the largest of cells on NVLink that rows of all ranks check."
)


def _of_one_rank(
    figure: Published, cells: Sequence[Cell], lines: Sequence[OverDepth]
) -> list[tuple[Cell, OverDepth | None, float]]:
    """The cell or the line of each link but of messages without delay, with its value."""
    depth = figure.where.get("num_layers")
    rest = {name: value for name, value in figure.where.items() if name != "num_layers"}

    def matches(cell: Cell) -> bool:
        delayed = cell.link not in ("", NO_DELAY)
        return delayed and cell.is_comparable and all(cell.asked[name] == value for name, value in rest.items())

    read = METRICS[figure.metric][1]
    wholes = [c for c in cells if matches(c) and c.asked["num_layers"] == depth]
    found: list[tuple[Cell, OverDepth | None, float]] = [(c, None, v) for c in wholes if (v := read(c)) is not None]
    if found or (by_line := OF_LINES.get(figure.metric)) is None:
        return found
    fitting = [line for line in lines if matches(line.few) and line.num_layers == depth]
    return [(line.few, line, value) for line in fitting if (value := by_line(line)) is not None]


def _ours(figure: Published, cells: Sequence[Cell]) -> Cell | None:
    """Our fastest matching cell, or the longest for max_seq_len. If none has the number, one that ran out of memory."""
    same = [
        c
        for c in cells
        if c.all_ranks_were_there and all(c.asked[name] == value for name, value in figure.where.items())
    ]
    known = [c for c in same if METRICS[figure.metric][1](c) is not None]
    if figure.metric == "max_seq_len":
        return max(known, key=lambda c: (c.asked["seq_len"], c.cell_id), default=None)
    failed = [c for c in same if c.out_of_memory]
    return min(known or failed, key=lambda c: (-(tokens_per_s(c) or 0.0), c.cell_id), default=None)
