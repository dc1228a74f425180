"""Figures that others published, from published.yaml, beside ours: context, never a like-for-like claim."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.formats import MISSING, number, whole
from sp_bench.analysis.limits import limits
from sp_bench.analysis.time_parts import kernel_alone
from sp_bench.report.cards import memory_gib, tflops, tokens
from sp_bench.rows.schema import SCHEMA

OOM, LONGEST = "OOM", "max_seq_len"
ABOUT = (
    "Context, not a like-for-like comparison. Measured is the cell of the same workload, model or heads, length and "
    "number of devices that is closest to the source's stack, then the fastest."
)


def _tokens_per_s(cell: Cell) -> float | None:
    return cell.rate(cell.median_step_ms, per_rank=False) if cell.median_step_ms else None


def _model_tflops(cell: Cell) -> float | None:
    flops, ms, size = cell.middle("model_flops"), cell.median_step_ms, cell.asked["world_size"]
    return flops / ms / size / 1e9 if flops and ms and size else None


def _gb(cell: Cell) -> float | None:
    on_device = cell.memory_column == "max_peak_allocated_bytes"
    return (memory_gib(cell) or 0.0) * 2**30 / 1e9 if on_device else None


METRICS: Mapping[str, tuple[str, Callable[[Cell], float | None]]] = {  # what a figure is of, with its unit
    "tokens_per_s": ("tokens/s", _tokens_per_s),
    "tokens_per_s_per_gpu": ("tokens/s/GPU", tokens),
    "attention_tflops_per_gpu": ("attention TFLOP/s/GPU", tflops),
    "model_tflops_per_gpu": ("model TFLOP/s/GPU", _model_tflops),
    "step_s": ("step, s", lambda cell: (cell.median_step_ms or 0.0) / 1e3 or None),
    "peak_memory_gb": ("peak GB/GPU", _gb),
    "percent_of_kernel": ("% of the kernel alone", lambda cell: None),
    "mean_nll_difference": ("mean NLL difference, nats", lambda cell: cell.largest("mean_nll_difference")),
    "max_nll_difference": ("largest NLL difference, nats", lambda cell: cell.largest("max_nll_difference")),
    LONGEST: ("longest seq_len, tokens", lambda cell: cell.asked["seq_len"]),
}


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
    sources = yaml.safe_load(files("sp_bench.report").joinpath("published.yaml").read_text("utf-8"))
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


def beside(cells: Sequence[Cell]) -> tuple[str, str, tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Title, words, heads and lines of a table: each published figure that a cell of ours may be set beside."""
    lines = [_line(figure, cell, cells) for figure in figures() for cell in _ours(figure, cells)]
    heads = ("source", "figure", "published", "measured", "ratio", "measured with", "differs in")
    return "Beside published figures", ABOUT, heads, tuple(lines)


def _read(figure: Figure, cell: Cell, cells: Sequence[Cell]) -> float | None:
    if not cell.ok:
        return None
    if figure.metric == "percent_of_kernel":
        alone = kernel_alone(cell, cells)
        return 100 * (alone.median_step_ms or 0.0) / (cell.median_step_ms or 1.0) if alone else None
    return METRICS[figure.metric][1](cell)


def _ours(figure: Figure, cells: Sequence[Cell]) -> list[Cell]:
    """Of its stack the closest cell with the optimizer offloaded and the closest without, else the fastest of its kind
    and the fastest of all; of differences the largest, a claim about all."""
    asked = [
        c
        for c in cells
        if c.all_ranks_were_there and figure.is_asked_of(c) and (_read(figure, c, cells) is not None or c.out_of_memory)
    ]
    if figure.metric == LONGEST:
        longest = max((limit.largest_ok.asked["seq_len"] for limit in limits(asked) if limit.largest_ok), default=None)
        asked = [c for c in asked if c.asked["seq_len"] == longest]
    if figure.reference:
        return sorted(asked, key=lambda c: -(_read(figure, c, cells) or 0.0))[:1]
    of_stack = [c for c in asked if figure.is_of_its_stack(c)]
    groups = [[c for c in of_stack if (c.asked["optimizer_offload"] is None) is plain] for plain in (False, True)]
    if not of_stack:
        groups = [[c for c in asked if figure.is_of_its_kind(c)], asked]
    best = [min(group, key=lambda c: _closeness(figure, c)) for group in groups if group]
    return list({cell.cell_id: cell for cell in best}.values())


def _closeness(figure: Figure, cell: Cell) -> tuple[Any, ...]:
    cap = cell.asked["device_memory_gib"]
    engine, kernel = (_rank(cell.asked[name], known or ()) for name, known in
                      (("engine", figure.our_engines), ("kernel", figure.our_kernels)))  # fmt: skip
    micro_batches = (cell.micro_batches != (figure.micro_batches or 1), cell.micro_batches)
    return (
        cap != figure.device_memory_gib,
        *micro_batches,
        engine,
        kernel,
        not cell.ok,
        cell.median_step_ms or 0.0,
        cell.cell_id,
    )


def _rank(name: str | None, closest_first: Sequence[str]) -> int:
    return next((rank for rank, known in enumerate(closest_first) if known == name), len(closest_first))


def _line(figure: Figure, cell: Cell, cells: Sequence[Cell]) -> tuple[str, ...]:
    ours, there = _read(figure, cell, cells), figure.value == OOM
    length = f"{whole(figure.where['seq_len'])} tokens" if "seq_len" in figure.where else ""
    by = f"by {figure.method}" if figure.method else ""
    what = ", ".join(
        filter(None, (" ".join(filter(None, (METRICS[figure.metric][0], by, figure.layout))), length, figure.reading))
    )
    if not cell.ok:
        ratio = "both" if there else "here only"
    elif isinstance(figure.value, str):
        ratio = "there only"
    else:
        ratio = f"{(ours or 0.0) / figure.value:.2f}" if figure.value else MISSING
    shown = figure.value if isinstance(figure.value, str) else f"{figure.value:,}"
    with_what = [words.method(cell), words.kernel(cell), str(cell.asked["engine"] or ""), cell.micro_batches_note]
    with_what += ["optimizer offloaded" if cell.asked["optimizer_offload"] else "", words.processors(cell)]
    measured = OOM if not cell.ok else number(ours)
    return (
        figure.source,
        what,
        shown,
        measured,
        ratio,
        ", ".join(filter(None, with_what)),
        ", ".join(_differs(figure, cell)),
    )


def _differs(figure: Figure, cell: Cell) -> list[str]:
    asked = cell.asked
    offloads = asked["optimizer_offload"] is not None
    model = figure.device_model or figure.device
    checks = {
        "engine": asked["engine"] not in figure.our_engines[:1],
        "device": str(asked["hardware"]).upper() not in model.upper(),
        "device memory": figure.device_memory_gib is not None
        and asked["device_memory_gib"] != figure.device_memory_gib,
        "offload": offloads != bool(figure.our_offloads),
        "micro-batches": cell.micro_batches != (figure.micro_batches or 1),
        "kernel": figure.our_kernels is None or asked["kernel"] not in figure.our_kernels,
        "method": figure.method is None or not figure.is_of_its_kind(cell),
        "launch": bool(cell.launch_note),
    }
    return [*(what for what, differs in checks.items() if differs), *map(str, figure.waived)]
