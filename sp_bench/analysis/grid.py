"""Ulysses or the ring, on one screen: numbers of GPUs and lengths against what was measured there. Each answer is of
the best-graded run; other runs of the same place stand behind it."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sp_bench.analysis import identifiers, words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.grades import A, B, C
from sp_bench.analysis.pattern_bytes import kind
from sp_bench.analysis.settings import AHEAD, CLOSE, QUESTION, TIE, UNDECIDED, UNPROVEN, Difference, Place, Setting
from sp_bench.config.conf_files import num_layers
from sp_bench.config.machine import NO_DELAY
from sp_bench.config.workload import TRAINING
from sp_bench.formats import counted, span, whole

COLUMNS = ATTENTION, STEP, WINDOWS, LINKS, PACKED = (
    "attention",
    "training step",
    "attention, windows",
    "attention, slower links",
    "attention, packed",
)
OF_SHAPE = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim", "dtype", "hardware")
OF_STEP = (
    *("kernel.name", "engine.name", "workload.activation_checkpointing", "workload.model_code"),
    *("workload.loss_tile_tokens", "workload.mlp_tile_tokens", "workload.linear_dtype"),
)


@dataclass(frozen=True)
class Entry:
    """One answer: on one kernel, model, link or pack."""

    label: str
    difference: Difference  # the faster one first
    others: tuple[float, ...]  # of other runs and packs, the slower method's time over the faster one's, in order
    alike: tuple[str, ...]  # our other methods that are not told apart from the faster one, where one leads

    @property
    def is_decided(self) -> bool:
        """An interval says who is faster, or that they tie, nothing is in doubt, and most other runs say so too."""
        found = self.difference
        if found.ratio is None or found.outcome not in (AHEAD, TIE) or not found.grade.may_be_bold:
            return False
        usual = median(self.others or (found.ratio,))
        return usual > 1 if found.outcome == AHEAD else max(usual, 1 / usual) <= 1 + found.smallest

    @property
    def verdict(self) -> str:
        """Ulysses 1.032x [1.029, 1.034]; tie, ring 1.004x [0.999, 1.006]; within 3%."""
        found = self.difference
        if found.outcome == CLOSE and self.is_of_one_rank:  # the ratio is below the model's error
            return f"within {found.smallest:.0%}"
        close = f"within {found.smallest:.0%}, "
        before = {TIE: "tie, ", CLOSE: close, UNDECIDED: "undecided, "}.get(found.outcome, "")
        alike = f", {words.listed_words(self.alike)} alike" if self.alike else ""
        return f"{before}{words.plain_method(found.fast)} {found.words}{alike}"

    @property
    def brief(self) -> str:
        """ring 1.032x [1.029, 1.034]; tie; within 2%; Ulysses 1.019x [1.013, 1.025], undecided."""
        found = self.difference
        if found.outcome in (TIE, CLOSE):
            return TIE if found.outcome == TIE else f"within {found.smallest:.0%}"
        undecided = ", undecided" if found.outcome == UNDECIDED else ""
        return f"{words.plain_method(found.fast)} {found.words}{undecided}"

    @property
    def is_of_one_rank(self) -> bool:
        return not self.difference.fast.all_ranks_were_there

    @property
    def more(self) -> str:
        """7 more: 1.028x to 1.047x."""
        return f"{len(self.others)} more: {span(self.others, '{:.3f}x'.format)}" if self.others else ""

    @property
    def mark(self) -> str:
        """A; C·once·aged; one rank·flagged."""
        found = self.difference.grade
        return "\N{MIDDLE DOT}".join(("one rank", *found.doubts)) if self.is_of_one_rank else found.words

    @property
    def campaign(self) -> str:
        return self.difference.keys[0].campaign

    @property
    def where(self) -> str:
        """What it is over: methods, kernel, campaign, evidence."""
        found = self.difference
        both = f"{words.the_method(found.fast)} against {words.the_method(found.slow)}"
        return f"{both}, {words.kernel(found.fast)}, {self.campaign}; {found.grade.why}"


@dataclass(frozen=True)
class Line:
    head: str  # 4 GPUs, 131,072
    entries: tuple[tuple[Entry, ...], ...]  # by column


@dataclass(frozen=True)
class Grid:
    caption: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]


def grid(settings: Sequence[Setting], at_least: int = 0, of_one_shape: bool = False) -> Grid | None:
    """All places on GPUs where Ulysses and the ring met, of the most frequent heads, dtype and hardware. None: nowhere.

    Rows of one real rank have lines of their own, for numbers of GPUs with which nothing was measured; of other heads
    too, which their labels name.

    at_least: tokens of the shortest sequence shown. of_one_shape: without other heads.
    """
    places = [p for setting in settings for p in setting.contests if (p.first.asked["seq_len"] or 0) >= at_least]
    met = [(place, found) for place in places if _is_whole(place.first) and (found := _question(place))]
    if not met:
        return None
    ((shape, _),) = Counter(_shape(place.first) for place, _ in met).most_common(1)
    measured = {place.first.asked["sp_size"] for place, _ in met if place.first.all_ranks_were_there}
    runs: dict[tuple[Any, ...], dict[tuple[str, str], list[tuple[Difference, Place]]]] = {}
    for place, found in met:
        first, is_of_shape = place.first, _shape(place.first) == shape
        is_shown = is_of_shape or not (of_one_shape or first.all_ranks_were_there)
        if is_shown and (first.all_ranks_were_there or first.asked["sp_size"] not in measured):
            key = (not first.all_ranks_were_there, first.asked["sp_size"], first.asked["seq_len"], _size(first))
            column, label = _column(first)
            label = label if is_of_shape else f"{words.heads(first)}, {label}"
            label += _parts(place) if column in (LINKS, PACKED) else ""
            runs.setdefault(key, {}).setdefault((column, label), []).append((found, place))
    columns = tuple(name for name in COLUMNS if any(of == name for each in runs.values() for of, _ in each))
    lines = [Line(key[-1], tuple(_entries(each, name) for name in columns)) for key, each in sorted(runs.items())]
    like = next(place.first for place, _ in met if _shape(place.first) == shape)
    caption = (
        f"{words.heads(like)}, {words.dtype(like)}, {words.hardware(like)}, causal, forward and backward. "
        '"Ring 1.10x": Ulysses takes 1.10 times as long.'
    )
    return Grid(caption, columns, tuple(lines))


def _is_whole(cell: Cell) -> bool:
    """Whether a cell is of causal attention, forward and backward, or of a step of the whole model, with messages that
    take time."""
    asked = cell.asked
    if asked["kv_lora_rank"]:  # what a rank sends of latents is another question: docs/LATENT.md
        return False
    if not asked["causal"] or asked["pass_kind"] == "forward" or cell.link == NO_DELAY:
        return False
    return asked["workload"] not in TRAINING or asked["num_layers"] in (None, num_layers(asked["model"]))


def _question(place: Place) -> Difference | None:
    """The faster of Ulysses and the ring against the other; against a third method of ours that is ahead of both, that
    one against the faster of them. None: they did not meet."""
    ulysses, ring = (place.of_kind(name) for name in QUESTION)
    if ulysses is None or ring is None or place.first.processor != "GPU":
        return None
    found = Difference(ulysses, ring, place.smallest)
    if found.ratio is None:
        return None
    if kind(place.leader) not in QUESTION:
        third = Difference(place.leader, found.turned.fast, place.smallest)
        if third.outcome == AHEAD or (third.outcome == UNPROVEN and not third.is_behind):
            return third
    return found.turned


def _entries(runs: dict[tuple[str, str], list[tuple[Difference, Place]]], column: str) -> tuple[Entry, ...]:
    """One a label, of its best run: that of the best grade, then not of older code, then without a doubt, then of the
    most pairs, then the newest. The best first, of packs that of most packs."""
    made = []
    for (of, label), found in sorted(runs.items()):
        if of == column:
            (best, place), *others = sorted(found, key=lambda run: _by_evidence(run[0]))
            packs = len({run.fast.options["seed"] for run, _ in found}) if of == PACKED else 0
            label += f", 1 of {packs} packs" if packs > 1 else ", 1 pack" if packs else ""
            ratios = sorted(_ratios(best, [other for other, _ in others if _computes_as_much(other.fast, best.fast)]))
            made.append((packs, Entry(label, best, tuple(ratios), tuple(_alike(place, best)))))
    return tuple(e for _, e in sorted(made, key=lambda each: (-each[0], *_by_evidence(each[1].difference)[:2])))


def _alike(place: Place, best: Difference) -> Iterable[str]:
    """Our other methods that are not told apart from the faster one; none where the two tie themselves."""
    if best.outcome in (AHEAD, UNPROVEN):
        for cell in place.own:
            is_third = kind(cell) not in QUESTION and cell is not best.fast
            if is_third and Difference(best.fast, cell, place.smallest).outcome in (TIE, CLOSE, UNDECIDED):
                yield words.plain_method(cell)


def _by_evidence(found: Difference) -> tuple[Any, ...]:
    order = (A, B, C)
    newest = max(row["started_at"] for cell in (found.fast, found.slow) for row in cell.measured)
    mark = order.index(found.grade.mark) if found.grade.mark in order else len(order)
    doubts = found.grade.doubts
    return (mark, "aged" in doubts, bool(doubts), -len(found.keys), -newest.timestamp())


def _ratios(best: Difference, others: Iterable[Difference]) -> Iterable[float]:
    """Ratios of other runs of the same two methods, with the same one below."""
    for other in others:
        if not other.ratio:
            continue
        if (kind(other.fast), kind(other.slow)) == (kind(best.fast), kind(best.slow)):
            yield other.ratio
        elif (kind(other.slow), kind(other.fast)) == (kind(best.fast), kind(best.slow)):
            yield 1 / other.ratio


def _computes_as_much(other: Cell, cell: Cell) -> bool:
    """Whether two runs of one label compute the same: steps on one kernel, with as much computed again and compiled."""
    return other.asked["workload"] not in TRAINING or all(
        other.options.get(path) == cell.options.get(path) for path in OF_STEP
    )


def _shape(cell: Cell) -> tuple[Hashable, ...]:
    return tuple(cell.asked[name] for name in OF_SHAPE)


def _parts(place: Place) -> str:
    """, undivided: where Ulysses' chunks of heads, its best way on slow links and in packs, were not tried."""
    tried = any(words.unusual(cell, "method.head_chunks") for cell in place.cells)
    return "" if tried else ", undivided"


def _size(cell: Cell) -> str:
    """4 GPUs, 131,072; 8 GPUs, 131,072, modelled."""
    length = whole(cell.asked["seq_len"])
    if cell.all_ranks_were_there:
        return f"{words.processors(cell)}, {length}"
    return f"{whole(cell.asked['world_size'])} GPUs, {length}, modelled"


def _column(cell: Cell) -> tuple[str, str]:
    """Which column, and the label there."""
    is_slow = cell.asked["fabric"] not in ("nvlink", None)
    link = words.fabric(cell.asked["fabric"]) if cell.all_ranks_were_there else _hosts(cell)
    slower = f", {link}" if is_slow else ""
    if cell.asked["workload"] in TRAINING:
        packed = ", packed" if words.is_packed(cell) else ""
        layers = cell.asked.get(words.LAYERS_RUN)
        by_line = ", by {} and {} layers".format(*layers) if layers else ""
        in_fp8 = f", {found}" if (found := words.unusual(cell, "workload.linear_dtype")) else ""
        return STEP, f"{words.model(cell)}{packed}{in_fp8}{slower}{by_line}"
    if words.is_packed(cell):
        windowed = f", window of {whole(window)}" if (window := cell.asked["window"]) else ""
        return PACKED, f"{words.drawn(cell)}{windowed}{slower}"
    if window := cell.asked["window"]:
        return WINDOWS, f"window of {whole(window)}{slower}"
    if is_slow:
        return LINKS, link if cell.all_ranks_were_there else f"{words.kernel(cell)}, {link}"
    return ATTENTION, ", ".join(filter(None, [words.kernel(cell), words.unusual(cell, identifiers.LAUNCH)]))


def _hosts(cell: Cell) -> str:
    """8 hosts of 1 GPU, 400 Gbit/s a GPU."""
    hosts = cell.options["num_nodes"]
    each = counted(cell.asked["world_size"] // hosts, "GPU")
    return f"{counted(hosts, 'host')} of {each}, {words.link(cell)}"
