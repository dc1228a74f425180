"""Published figures, from published.yaml, beside our fastest cells with the same columns. This is context, no
comparison of like with like."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.metrics import memory_gib, tflops, tokens_per_s, tokens_per_s_per_gpu
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
    offloaded = words.unusual(cell, "engine.optimizer_offload")
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
