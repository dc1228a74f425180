"""Published figures beside what was measured here, with what differs: context, never a like-for-like claim."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from sp_bench.report.cells import Cell, listed
from sp_bench.report.formats import MISSING, whole
from sp_bench.report.limits import limits
from sp_bench.report.provenance import words
from sp_bench.report.ratios import fastest
from sp_bench.report.series import OWN_CODE
from sp_bench.report.tables.metrics import LONGEST, METRICS
from sp_bench.report.tables.parts import Column, Entry, PaperTable, legend, measured, significant, words_of

# The columns of a row that a published figure may ask to be equal.
COLUMNS = (
    *("workload", "pass_kind", "model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "causal"),
    *("seq_len", "sp_size", "world_size"),
)
CAPTION = (
    "Context, not a like-for-like comparison: each line says what differs. Measured is the fastest cell of the same "
    "workload, model or heads, length and number of devices, by the same kind of method and by any; ratio: measured / "
    "published."
)


@dataclass(frozen=True)
class Figure:
    """One published figure; the fields are explained in published.yaml."""

    source: str
    subject: str
    device: str
    engine: str
    read: str
    metric: str
    value: float | str
    where: Mapping[str, Any]
    method: str | None = None
    layout: str | None = None
    kernel: str | None = None
    our_kernels: Sequence[str] | None = None

    def is_asked_of(self, cell: Cell) -> bool:
        return all(cell.asked[name] == value for name, value in self.where.items())

    def is_of_its_kind(self, cell: Cell) -> bool:
        same = self.layout is None or cell.asked["layout"] == self.layout
        return same and cell.asked["method"] == self.method


@cache
def figures() -> tuple[Figure, ...]:
    """All of published.yaml.

    Raises:
        TypeError: a field that no figure has, or one that it lacks.
    """
    sources = yaml.safe_load(files("sp_bench.report.tables").joinpath("published.yaml").read_text("utf-8"))
    made = []
    for source in sources:
        shared = {name: value for name, value in source.items() if name not in ("figures", "where")}
        for figure in source["figures"]:
            where = source["where"] | {name: figure[name] for name in COLUMNS if name in figure}
            own = {name: value for name, value in figure.items() if name not in COLUMNS}
            made.append(Figure(**shared | own, where=where))
    return tuple(made)


def tables(cells: Sequence[Cell]) -> list[PaperTable]:
    """One, or none where no published figure has a cell of ours beside it."""
    pairs = [(figure, cell) for figure in figures() for cell in _ours(figure, cells)]
    if not pairs:
        return []
    lines = tuple(_line(figure, cell, cells) for figure, cell in pairs)
    columns = (
        *(Column("source"), Column("figure")),
        *(Column(name, is_number=True) for name in ("published", "measured", "ratio")),
        *(Column("measured with"), Column("differs in")),
    )
    used = tuple({(cell.setting, cell.cell_id): cell for _, cell in pairs}.values())
    settings = sorted({cell.setting for cell in used})
    caption = " ".join([CAPTION, *dict.fromkeys(_about(figure) for figure, _ in pairs)]) + legend(lines)
    setting = settings[0] if len(settings) == 1 else ""
    return [PaperTable("published", setting, "published", "Published figures", caption, columns, lines, words(used))]


def _about(figure: Figure) -> str:
    """A sentence on what the source ran, for the caption."""
    kernel = f", {figure.kernel}" if figure.kernel else ""
    devices = f"{figure.where['world_size']} x {figure.device}"
    return f"{figure.source}: {figure.subject}; {figure.engine}{kernel}; {devices}; figures {figure.read}."


def _ours(figure: Figure, cells: Sequence[Cell]) -> list[Cell]:
    """The fastest of its kind and the fastest of all, once if they are one; else one that failed."""
    asked = [c for c in cells if figure.is_asked_of(c)]
    if figure.metric == LONGEST:
        longest = max((limit.largest_ok.asked["seq_len"] for limit in limits(asked) if limit.largest_ok), default=None)
        asked = [c for c in asked if c.asked["seq_len"] == longest]
    ran = [c for c in asked if c.ok and METRICS[figure.metric].read(c, cells) is not None]
    groups = [[c for c in group if figure.is_of_its_kind(c)] for group in (ran, asked)]
    found = [fastest(group) for group in (groups[0], ran) if group]
    failed = [c for c in groups[1] if not c.ok][:1] if not groups[0] else []
    return list({(c.setting, c.cell_id): c for c in [*failed, *found]}.values())


def _line(figure: Figure, cell: Cell, cells: Sequence[Cell]) -> tuple[Entry, ...]:
    metric = METRICS[figure.metric]
    ours = metric.read(cell, cells) if cell.ok else None
    theirs = None if isinstance(figure.value, str) else float(figure.value)
    length = f"{whole(figure.where['seq_len'])} tokens" if "seq_len" in figure.where else ""
    by = " ".join(filter(None, ("by" if figure.method else "", figure.method, figure.layout)))
    what = " ".join(filter(None, (metric.title, by)))
    ratio = ours / theirs if ours is not None and theirs else None
    return (
        Entry(figure.source),
        Entry(", ".join(filter(None, (what, length)))),
        Entry(f"{figure.value:,}", number=f"{figure.value:,}") if theirs is not None else Entry(str(figure.value)),
        words_of(cell) if ours is None else measured(cell, significant(ours)),
        Entry(MISSING) if ratio is None else measured(cell, f"{ratio:.2f}"),
        Entry(_named(cell), cells=(cell,)),
        Entry(_differs(figure, cell)),
    )


def _devices(cell: Cell) -> list[str]:
    names = (listed((row["environment"] or {}).get("device_names")) for row in cell.measured or cell.rows)
    found = sorted({str(name) for each in names for name in each})
    return found or [str(cell.asked["hardware"])]


def _named(cell: Cell) -> str:
    kernel = str(cell.asked["kernel"])
    series = cell.series if kernel in cell.series.split() else f"{cell.series}, {kernel}"
    cap = cell.asked["device_memory_gib"]
    capped = "" if cap is None else f" capped at {cap:g} GiB"
    return f"{series}; {cell.asked['world_size']} x {', '.join(_devices(cell))}{capped}, {cell.asked['fabric']}"


def _differs(figure: Figure, cell: Cell) -> str:
    """Engine always does: ours is this benchmark, whoever wrote the attention."""
    different = ["engine"]
    if not all(figure.device.split()[0] in name.split() for name in _devices(cell)):
        different.append("device")
    if figure.our_kernels is None:
        different.append("kernel (not said)")
    elif cell.asked["kernel"] not in figure.our_kernels:
        different.append("kernel")
    if figure.method is None:
        different.append("method (not said)")
    elif not figure.is_of_its_kind(cell):
        different.append("method")
    if cell.asked["implementation"] not in (None, OWN_CODE):
        different.append("whose method")
    return ", ".join(different)
