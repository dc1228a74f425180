"""Counts in how many campaigns Ulysses is faster than each other method. An interval from one machine cannot show how
a result holds over machines."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.ratios import PairedRatio, paired_ratio, ratio_of_pairs
from sp_bench.analysis.settings import Place, Setting
from sp_bench.analysis.words import is_packed

RIVALS = ("ring", "all_gather", "usp")


@dataclass(frozen=True)
class Sign:
    """A method against Ulysses at one place, both in their fastest variants."""

    setting: Setting
    place: Place
    ulysses: Cell
    rival: Cell

    @property
    def paired(self) -> PairedRatio | None:
        return paired_ratio(self.rival, self.ulysses)

    @property
    def ratio(self) -> float | None:
        """Step time over that of Ulysses; None if they never ran in one campaign on one machine."""
        return ratio_of_pairs(self.rival, self.ulysses)

    @property
    def by_campaign(self) -> dict[str, float]:
        """Campaign -> ratio of its own fastest variants, for campaigns that ran both on one machine."""
        over, under = (_fastest(self.place, str(cell.asked["method"])) for cell in (self.rival, self.ulysses))
        both = {name: ratio_of_pairs(over[name], under[name], name) for name in sorted(over.keys() & under.keys())}
        return {name: ratio for name, ratio in both.items() if ratio is not None}


@dataclass(frozen=True)
class Count:
    """In how many of the campaigns that measured a place Ulysses was ahead. Intervals of ratios do not count."""

    rival: str
    of: Hashable  # identifies the place; equal for all rivals
    first: Cell
    ratios: dict[str, float]  # by campaign
    machines: int

    @property
    def where(self) -> str:
        first = self.first
        setting = words.setting(first)
        return ", ".join([*setting, words.place(first), words.fabric(first.asked["fabric"]), words.kernel(first)])

    @property
    def words(self) -> str:
        """Ulysses ahead of the ring in 8 of 8 campaigns on 7 machines, 1.026x to 1.053x."""
        article = "the " if self.rival in words.WITH_ARTICLE else ""
        return f"Ulysses ahead of {article}{words.METHODS[self.rival]} in {self.tally}"

    @property
    def tally(self) -> str:
        """8 of 8 campaigns on 7 machines, 1.026x to 1.053x."""
        ahead = sum(ratio > 1 for ratio in self.ratios.values())
        on = f" on {self.machines} machines" if self.machines > 1 else ""
        span = f"{min(self.ratios.values()):.3f}x to {max(self.ratios.values()):.3f}x"
        return f"{ahead} of {len(self.ratios)} campaigns{on}, {span}"


def signs(settings: Sequence[Setting], rival: str) -> list[Sign]:
    """One sign per place on GPUs where both ran; the largest places of a setting first."""
    found = []
    for setting in settings:
        for place in reversed(setting.places):
            ulysses, other = place.of_kind("ulysses"), place.of_kind(rival)
            if ulysses is not None and other is not None and ulysses.processor == "GPU":
                found.append(Sign(setting, place, ulysses, other))
    return found


def counts(settings: Sequence[Setting]) -> list[Count]:
    """The counts over two or more campaigns, those with most campaigns first.

    Campaigns may differ in isolation, code and a fabric's variables. Packed documents are left out: they are different
    work at the same length.
    """
    found: dict[tuple[str, Hashable], list[Sign]] = {}
    for rival in RIVALS:
        for sign in signs(settings, rival):
            if not is_packed(sign.place.first):
                found.setdefault((rival, _place(sign.ulysses)), []).append(sign)
    made = []
    for (rival, place), each in found.items():
        ratios: dict[str, float] = {}
        for sign in sorted(each, key=lambda s: len(s.ulysses.step_ms)):  # the last wins: the one with most replicates
            ratios |= sign.by_campaign
        if len(ratios) > 1:
            rows = [row for sign in each for cell in (sign.ulysses, sign.rival) for row in cell.measured]
            machines = {row["device_set"] for row in rows if row["folder"] in ratios} - {None}
            made.append(Count(rival, place, each[0].place.first, ratios, len(machines)))
    return sorted(made, key=lambda count: -len(count.ratios))


def _place(cell: Cell) -> Hashable:
    """Equal for cells of any method with the same work, options and device name. Of a model, attention depends on the
    heads only."""
    model = () if cell.asked["workload"] == "train_step" else ("model",)
    return (words.heads(cell), cell.asked["fabric"], *cell.but("method", "isolation", "fabric", *model))


def _fastest(place: Place, method: str) -> dict[str, Cell]:
    """Campaign -> the method's cell with the smallest median there."""
    found: dict[str, tuple[float, Cell]] = {}
    for cell in place.cells:
        if cell.asked["method"] == method:
            for name in {key.campaign for key in cell.step_ms}:
                ms = median(each for key, each in cell.step_ms.items() if key.campaign == name)
                found[name] = min(found.get(name, (ms, cell)), (ms, cell), key=lambda each: each[0])
    return {name: cell for name, (_, cell) in found.items()}
