"""Figures that others published, from published.yaml, and which cells of ours may be set beside each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from sp_bench.report.cells import Cell

# The columns of a row that a published figure may ask to be equal.
COLUMNS = (
    *("workload", "pass_kind", "model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "causal"),
    *("batch_size", "seq_len", "sp_size", "world_size"),
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
    our_engines: Sequence[str] = ()
    our_methods: Sequence[str] = ()
    our_offloads: Sequence[str] = ()
    device_model: str = ""  # empty: `device` is one
    device_memory_gib: float | None = None
    activation_checkpointing: str | None = None
    micro_batches: int | None = None
    reference: str = ""
    reading: str = ""
    note: str = ""
    waived: Mapping[str, Any] = field(default_factory=dict)  # columns of the source that this figure does not ask for

    def is_asked_of(self, cell: Cell) -> bool:
        return all(cell.asked[name] == value for name, value in self.where.items())

    def is_of_its_kind(self, cell: Cell) -> bool:
        same = self.layout is None or cell.asked["layout"] == self.layout
        return same and cell.asked["method"] in (self.method, *self.our_methods)

    def is_of_its_stack(self, cell: Cell) -> bool:
        return cell.asked["engine"] in self.our_engines and self.is_of_its_kind(cell)


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
            asked = {name: value for name, value in where.items() if value is not None}
            waived = {name: source["where"][name] for name in where if name not in asked}
            own = {name: value for name, value in figure.items() if name not in COLUMNS}
            made.append(Figure(**shared | own, where=asked, waived=waived))
    return tuple(made)


def published_tokens_per_s(cell: Cell, start: Cell) -> tuple[Figure, Figure] | None:
    """What one source published of both cells, as its own stack is ours; None where no source did."""
    rates = [f for f in figures() if f.metric == "tokens_per_s" and not isinstance(f.value, str)]
    over = [f for f in rates if f.is_asked_of(cell) and f.is_of_its_stack(cell)]
    under = [f for f in rates if f.is_asked_of(start) and f.is_of_its_stack(start)]
    return next(((o, u) for o in over for u in under if o.source == u.source), None)
