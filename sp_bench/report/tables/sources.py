"""Figures that others published, from published.yaml, and which cells of ours may be set beside each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from sp_bench.report.cells import Cell
from sp_bench.rows.schema import SCHEMA


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

    What is no field of a figure is a column of a row that must be equal.

    Raises:
        TypeError: a field that a figure lacks.
        ValueError: a field that neither a figure nor a row has.
    """
    own = {field.name for field in fields(Figure)}
    sources = yaml.safe_load(files("sp_bench.report.tables").joinpath("published.yaml").read_text("utf-8"))
    made = []
    for source in sources:
        shared = {name: value for name, value in source.items() if name not in ("figures", "where")}
        for figure in source["figures"]:
            where = source["where"] | {name: value for name, value in figure.items() if name not in own}
            if unknown := sorted(where.keys() - set(SCHEMA.names)):
                raise ValueError(f"{source['source']}: neither fields of a figure nor columns: {', '.join(unknown)}")
            asked = {name: value for name, value in where.items() if value is not None}
            waived = {name: source["where"][name] for name in where if name not in asked}
            of_figure = {name: value for name, value in figure.items() if name in own}
            made.append(Figure(**shared | of_figure, where=asked, waived=waived))
    return tuple(made)


def published_tokens_per_s(cell: Cell, start: Cell) -> tuple[Figure, Figure] | None:
    """What one source published of both cells, as its own stack is ours; None where no source did."""
    rates = [f for f in figures() if f.metric == "tokens_per_s" and not isinstance(f.value, str)]
    over = [f for f in rates if f.is_asked_of(cell) and f.is_of_its_stack(cell)]
    under = [f for f in rates if f.is_asked_of(start) and f.is_of_its_stack(start)]
    return next(((o, u) for o in over for u in under if o.source == u.source), None)
