"""Counted attention bytes of a cell, compared with what our method of its kind sends by default.

A library's own prediction is of what it sends; this explains how that differs from its communication pattern.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from fractions import Fraction

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.identifiers import RECOMPUTED
from sp_bench.config.shape import AttentionShape
from sp_bench.costs import patterns
from sp_bench.costs.patterns import Degrees

ATTENTION_PHASES = ("forward", "recompute", "backward")  # phases of the ledger; the engine sends the rest of a step
UNEVEN = "heads do not divide evenly: counted is the rank that sends most, the closed form the mean"
UNEXPLAINED = "not explained"


@dataclass(frozen=True)
class PatternBytes:
    """Bytes that one rank sends off-rank for the attention of one step."""

    pattern: str  # our method of the kind
    closed_form: float
    counted: float
    reasons: Mapping[str, float]  # reason -> bytes more (or less); they add up to counted - closed_form

    @property
    def ratio(self) -> float:
        return self.counted / self.closed_form


def degrees(cell: Cell) -> Degrees | None:
    ulysses, ring = cell.asked["ulysses_degree"], cell.asked["ring_degree"]
    return Degrees(ulysses, ring) if ulysses and ring else None


def kind(cell: Cell) -> patterns.Kind | None:
    """Our method with the same pattern; None if unknown, if latents travel, or without softmax."""
    split = None if cell.asked["sends"] or cell.asked["attention_kind"] else degrees(cell)
    return split and patterns.kind(str(cell.asked["method"]), cell.asked["variant"], split)


def pattern_bytes(cell: Cell) -> PatternBytes | None:
    """Compare a cell with its pattern. None if bytes were not counted, the shape is unknown or nothing has to be
    sent."""
    split, pattern, shape, weights = degrees(cell), kind(cell), _shape(cell), _passes(cell)
    passes = ("forward", "backward") if _keeps_output(cell) else ATTENTION_PHASES
    counted = [size for phase, (_, size) in cell.communication.phases.items() if phase in passes]
    if split is None or pattern is None or shape is None or not weights or not counted or None in counted:
        return None
    closed = _total(patterns.closed_form(pattern, shape, split), weights)
    if not closed:
        return None
    library = patterns.LIBRARIES.get((str(cell.asked["method"]), cell.asked["variant"]))
    more = {w: _total(b, weights) for w, b in (patterns.differences(library, shape, split) if library else {}).items()}
    total = sum((Fraction(size) for size in counted if size is not None), Fraction(0))
    rest = total - closed - sum(more.values(), Fraction(0))
    if rest:
        more[UNEVEN if shape.num_heads % split.ulysses or shape.num_kv_heads % split.ulysses else UNEXPLAINED] = rest
    reasons = {words: float(size) for words, size in more.items() if size}
    return PatternBytes(pattern, float(closed), float(total), reasons)


def _total(sizes: patterns.Bytes, weights: Mapping[str, int]) -> Fraction:
    return sum((size * weights[phase] for phase, size in sizes.items()), Fraction(0))


def _shape(cell: Cell) -> AttentionShape | None:
    known = {field.name: cell.asked[field.name] for field in fields(AttentionShape) if field.name in cell.asked}
    known["seq_len"] = cell.asked["padded_seq_len"] or known["seq_len"]
    required = [field.name for field in fields(AttentionShape) if field.default is MISSING]
    return None if any(known.get(name) is None for name in required) else AttentionShape(**known)


def _passes(cell: Cell) -> Mapping[str, int]:
    """How often one step runs the attention's forward and backward; nothing for other workloads,
    and where layers differ."""
    if cell.asked["workload"] == "attention":
        return {"forward": 1, "backward": int(cell.asked["pass_kind"] != "forward")}
    if cell.asked["workload"] != "train_step" or not cell.asked["num_layers"] or cell.asked["layer_window"]:
        return {}
    calls = cell.asked["num_layers"] * cell.micro_batches
    recomputed = cell.options.get(RECOMPUTED) == "full"
    return {"forward": calls * (1 + recomputed), "backward": calls}


def _keeps_output(cell: Cell) -> bool:
    """Whether recomputation repeats a part of the forward's messages only, which is no pass of the pattern."""
    return cell.options.get(RECOMPUTED) == "selective_output"
