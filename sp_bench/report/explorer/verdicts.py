"""The explorer's verdicts: pairs of cells of one campaign with equal options, a sentence each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.grades import A, B
from sp_bench.analysis.identifiers import SAVED
from sp_bench.analysis.ladder import of_place
from sp_bench.analysis.pattern_bytes import kind
from sp_bench.analysis.ratios import fastest, ranked
from sp_bench.analysis.settings import AHEAD, QUESTION, TIE, Difference, Setting
from sp_bench.config.workload import TRAINING


@dataclass(frozen=True)
class Verdict:
    """`65,536 tokens on 4 GPUs: the zigzag ring takes 1.004x [0.999, 1.009] as long as Ulysses (a tie).`"""

    text: str
    difference: Difference

    @property
    def is_decided(self) -> bool:
        """Printed in bold."""
        return self.difference.outcome in (AHEAD, TIE) and self.difference.grade.may_be_bold

    @property
    def order(self) -> tuple[Any, ...]:
        """Ulysses against the ring first, then what is measured and well graded, then most ranks and tokens."""
        found, asked = self.difference, self.difference.fast.asked
        mark, is_question = found.grade.mark, {kind(found.fast), kind(found.slow)} == {*QUESTION}
        sizes = (-(asked[name] or 0) for name in ("world_size", "seq_len"))
        measured = found.fast.all_ranks_were_there
        return (not is_question, not measured, mark not in (A, B), not self.is_decided, mark, *sizes, self.text)


def verdicts(settings: Sequence[Setting]) -> list[Verdict]:
    """All verdicts, the first one to be shown first. The campaigns of `settings` are not pooled."""
    return sorted([*_of_methods(settings), *_of_stacks(settings)], key=lambda each: each.order)


def stack(cell: Cell) -> str:
    """The engine of a training step, or whose code an attention is."""
    return str(cell.asked["engine"] or cell.asked["implementation"]).partition("==")[0]


def _of_methods(settings: Sequence[Setting]) -> Iterator[Verdict]:
    """The leader of each place against each other method: equal options, one kernel. Ulysses and the ring are compared
    even if neither leads."""
    for place in (place for setting in settings for place in setting.contests):
        asked = [cell for name in QUESTION if (cell := place.of_kind(name)) is not None]
        pairs = [(place.leader, other) for other in place.others]
        pairs += [(asked[0], asked[1])] if len(asked) == 2 and place.leader not in asked else []
        for fast, slow in pairs:
            yield from _verdict(Difference(fast, slow, place.smallest), words.the_method(fast), words.the_method(slow))


def _of_stacks(settings: Sequence[Setting]) -> Iterator[Verdict]:
    """The fastest stack's step against that of each other: the same work on one kernel, as much recomputed and
    offloaded, messages of one pattern. The sentence names what else differs. No step counts that waits for the host."""
    places: dict[tuple[Any, ...], dict[str, list[Cell]]] = {}
    smallest = {cell.cell_id: setting.smallest_for(cell) for setting in settings for cell in setting.cells}
    for cell in (cell for setting in settings for cell in setting.cells):
        if cell.ok and cell.asked["workload"] in TRAINING and cell.is_comparable:
            key = (cell.pool, kind(cell), cell.asked["kernel"], *map(cell.options.get, SAVED), *of_place(cell))
            places.setdefault(key, {}).setdefault(stack(cell), []).append(cell)
    for stacks in places.values():
        best, *others = ranked([fastest(each) for each in stacks.values()])
        for other in others:
            differ = [path for path in words.step_columns((best, other)) if path != "engine.name"]
            names = [
                [words.method(cell), stack(cell), *(words.of_step(path, cell.options.get(path)) for path in differ)]
                for cell in (best, other)
            ]
            difference = Difference(best, other, smallest[best.cell_id])
            yield from _verdict(difference, *(", ".join(filter(None, parts)) for parts in names))


def _verdict(found: Difference, fast_name: str, slow_name: str) -> Iterator[Verdict]:
    """Nothing where no replicates pair. Nothing of CPUs either: their times say nothing of GPUs."""
    if found.ratio is None or found.fast.processor != "GPU":
        return
    if found.ratio < 1:
        found, fast_name, slow_name = found.turned, slow_name, fast_name
    doubt = f" ({found.doubt})" if found.doubt else ""
    place = words.place(found.fast)
    yield Verdict(f"{place}: {slow_name} takes {found.words} as long as {fast_name}{doubt}.", found)
