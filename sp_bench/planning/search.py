"""seq_len=max: the search for the longest sequence that fits, as pure functions: no files, no processes.

The next probe follows from the probes that have a status, whichever run or search made them. The search starts from a
guess, unless the guess is known to fit or not to. It steps away from there until one length fits and a longer one
does not, and halves that bracket down to the resolution. Then it tries both ends of the bracket once more, each in
fresh processes, and one length above: memory need not be monotone in the length.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sp_bench import methods
from sp_bench.config.documents import MULTIPLE, longest_pack, shortest_pack
from sp_bench.config.options import canonical
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import PROVABLE_TOKENS, TRAINING
from sp_bench.costs import memory, nccl
from sp_bench.methods import closed_forms
from sp_bench.planning.settings import SearchConfig
from sp_bench.rows.names import as_asked, config_leaves

LONGEST = 2**28  # tokens; beyond, a search has lost its way
# How far the next length is, in resolutions, after one and after two on one side of the edge; then 1.5 times, then
# twice. Lengths are rounded to an eighth of a resolution: where the first step crosses the edge, no bisection is left.
FIRST_STEPS = (0.87, 3.0)
# of a host's free memory, for each rank: its process, and the driver, compilers and files in memory. In three searches
# what fitted left 5.6 to 6.9 GiB a rank of what was free before, and what did not 3.6 to 4.9
OUTSIDE_ON_HOST_BYTES = 6 * 2**30
STARTS_FROM = 4096  # tokens a rank, without a better guess
# of a training step: a text may begin with equal bytes, a line of `#`, over which dQ and dK are 0 whatever is computed
SHORTEST_STEP_TOKENS = 256
# status of a whole step that says nothing about memory -> the doubt that it leaves
UNCONFIRMED = {
    "unsupported": "fit only: the whole step cannot run here",
    "timeout": "fit only: the whole step did not end in time",
}


@dataclass(frozen=True)
class Search:
    """A cell whose length is searched for."""

    config: TrialConfig  # at any length

    def at(self, seq_len: int, *, confirming: bool = False) -> TrialConfig:
        """The trial at a length. Where lengths are tried with `workload.fit`, a whole step confirms the longest."""
        workload = replace(self.config.workload, fit=self.config.workload.fit and not confirming)
        return replace(self.config, seq_len=seq_len, workload=workload)

    @property
    def multiple(self) -> int:
        """Lengths that the method can cut without padding, and packs of documents may have, are multiples of it."""
        layout = methods.layout_of(self.config)
        return layout.multiple if self.config.workload.packing == "none" else math.lcm(layout.multiple, MULTIPLE)

    @property
    def shortest(self) -> int:
        """The shortest length to try: a pack has two documents or more, a step SHORTEST_STEP_TOKENS."""
        workload, multiple = self.config.workload, self.multiple
        least = SHORTEST_STEP_TOKENS if workload.name in TRAINING else PROVABLE_TOKENS
        if workload.packing != "none":
            least = max(least, shortest_pack(workload.document_len or 0))
        return -(-least // multiple) * multiple

    @property
    def longest(self) -> int:
        """The longest length that a trial may have: a pack has at most MAX_DOCUMENTS documents."""
        workload, multiple = self.config.workload, self.multiple
        if workload.packing == "none":
            return LONGEST // multiple * multiple
        drawn = (workload.packing, workload.document_len or 0, workload.document_sigma or 0.0, self.config.seed)
        return longest_pack(*drawn, LONGEST) // multiple * multiple

    def probe_of(self, row: Mapping[str, Any]) -> "Probe | None":
        """The probe of this search that a row is; None if the row differs in more than its length."""
        fit = self.config.workload.fit
        apart = ("seq_len", "workload.fit") if fit else ("seq_len",)
        if as_asked(row["config"], apart) != as_asked(canonical(self.config), apart):
            return None
        whole = not config_leaves(row["config"]).get("workload.fit")
        return Probe(row["seq_len"], row["replicate"], confirming=fit and whole)

    def course(self, guess: int, settings: SearchConfig) -> "Course":
        longest = min(settings.longest or LONGEST, self.longest)
        within = replace(settings, longest=longest)
        return Course(min(guess, longest), self.multiple, self.shortest, within, self.config.workload.fit)

    def guess(self, device_bytes: int | None, host_bytes: int | None, start: int | None) -> int:
        """Tokens of the first probe: the user's `start`, else the edge that the memory model expects, else STARTS_FROM
        a rank. 0 if nothing fits by the model. device_bytes: memory of the smallest GPU. host_bytes: free host
        memory."""
        config = self.config
        cap = config.hardware.device_memory_gib
        own = device_bytes and device_bytes / config.hardware.ranks_per_gpu
        known = [size for size in (own, None if cap is None else cap * 2**30) if size is not None]
        modelled = memory.unmodelled_reason(config) is None and config.hardware.device != "cpu"
        if start is not None or not (known and modelled):
            return start or STARTS_FROM * config.sp_size
        room = nccl.usable_bytes(min(known), closed_forms.outside_allocator(config), config.hardware.allocator)
        host = (host_bytes or math.inf) - config.ranks_per_node * OUTSIDE_ON_HOST_BYTES
        return self._longest(
            lambda tried: memory.peak(tried).bytes <= room and memory.held_on_host_bytes(tried) <= host
        )

    def longest_on_host(self, host_bytes: int | None) -> int | None:
        """The longest length that a host's memory holds; `plan` refuses longer ones. 0 if none fits; None if all do."""
        longest = self._longest(lambda tried: memory.needed_on_host_bytes(tried) <= (host_bytes or math.inf))
        return longest if longest < self.longest else None

    def _longest(self, fits: Callable[[TrialConfig], bool]) -> int:
        """The longest length that a trial may have and that fits; 0 if none does."""
        lengths = range(self.shortest, self.longest + 1, self.multiple)
        number = bisect_left(lengths, True, key=lambda length: not fits(self.at(length)))
        return lengths[number - 1] if number else 0


class Probe(NamedTuple):
    seq_len: int
    replicate: int
    confirming: bool = False  # the longest that fits


@dataclass(frozen=True)
class Edge:
    """The bracket in which memory runs out, as far as is known. None: no such length was tried."""

    fits: int | None  # the longest that ran, each time that it was tried
    fails: int | None  # the shortest above it that was out of memory
    note: str = ""
    ended: bool = True  # False: it stopped before both ends were tried twice

    @property
    def words(self) -> str:
        nothing = "nothing fits" if self.fails is not None else "nothing that fits was tried"
        fits = nothing if self.fits is None else f"{self.fits:,} tokens fit"
        fails = "nothing ran out of memory" if self.fails is None else f"{self.fails:,} do not"
        return f"[{fits}, {fails}]{f'; {self.note}' if self.note else ''}"


@dataclass(frozen=True)
class Course:
    """The lengths that a search may try, and how far apart."""

    guess: int  # tokens
    multiple: int  # of which lengths are
    shortest: int  # of the lengths that a trial may have
    settings: SearchConfig
    fit: bool  # lengths are tried with `workload.fit`, and the longest is confirmed by a whole step

    @property
    def longest(self) -> int:
        """The longest length that may be tried."""
        return max((self.settings.longest or LONGEST) // self.multiple * self.multiple, self.shortest)

    @property
    def start(self) -> int:
        return min(self.rounded(self.guess), self.longest)

    def rounded(self, length: float) -> int:
        """The nearest of the method's lengths, as round as the resolution allows; at least the shortest."""
        unit = self.multiple
        while 2 * unit <= length * self.settings.resolution / 4:
            unit *= 2
        return max(round(length / unit) * unit, self.shortest)

    def factor(self, number: int) -> float:
        """The next length over the last one, after `number` lengths on one side of the edge."""
        factors = (*(1 + step * self.settings.resolution for step in FIRST_STEPS), 1.5, 2.0)
        return factors[min(max(number, 1), len(factors)) - 1]


def so_far(found: Mapping[Probe, str]) -> Edge:
    """The bracket so far. A length that was out of memory once does not fit."""
    ran, failed = _lengths(found, "ok"), _lengths(found, "oom")
    low = max(ran - failed, default=None)
    return Edge(low, min((length for length in failed if low is None or length > low), default=None), ended=False)


def _lengths(found: Mapping[Probe, str], ended: str) -> set[int]:
    return {probe.seq_len for probe, status in found.items() if status == ended}


def _probes(found: Mapping[Probe, str], seq_len: int, ended: str) -> list[Probe]:
    return [probe for probe, status in found.items() if probe.seq_len == seq_len and status == ended]


def next_step(found: Mapping[Probe, str], course: Course, known: int = 0) -> Probe | Edge:
    """The next probe, or the end of the search. found: the status of each probe so far. known: how many of them were no
    trials of this run and do not count against its budget."""
    step = _next_step(found, course)
    if isinstance(step, Probe) and len(found) - known >= (most := course.settings.max_probes):
        return replace(so_far(found), note=f"stopped after search.max_probes={most}")
    return step


def probes_ahead(found: Mapping[Probe, str], course: Course, known: int = 0) -> list[Probe]:
    """The trials that the search has left, if nothing fits beyond what is known to, or beyond the start."""
    edge = so_far(found)
    longest = edge.fits or (course.start if edge.fails is None else edge.fails - 1)
    ahead = dict(found)
    while isinstance(step := next_step(ahead, course, known), Probe):
        ahead[step] = "ok" if step.seq_len <= longest else "oom"
    return [probe for probe in ahead if probe not in found]


def _next_step(found: Mapping[Probe, str], course: Course) -> Probe | Edge:
    edge, longest = so_far(found), course.longest
    low, high = edge.fits, edge.fails
    for probe, status in found.items():
        if status not in ("ok", "oom") and not (probe.confirming and status in UNCONFIRMED):
            return Edge(low, high, f"{probe.seq_len:,} tokens ended as {status}")
    if (between := _between(found, course)) is not None:
        return Probe(between, 0)
    if low is None or high is None:
        return Edge(low, high, f"nothing beyond {max(longest, low or 0):,} was tried" if high is None else "")
    whole_step_failed = any(probe.confirming for probe in _probes(found, high, "oom"))
    ends = (Probe(low, 1, confirming=course.fit), *(() if whole_step_failed else (Probe(high, 1),)))
    untried = [end for end in ends if end not in found]
    for end in untried:
        if end.seq_len <= longest:
            return end
    above = max(course.rounded(high * (1 + 4 * course.settings.resolution)), high + course.multiple)
    if max(probe.seq_len for probe in found) < above <= longest:
        return Probe(above, 0)
    return Edge(low, high, _doubts(found, low, high, longest), ended=not untried)


def _between(found: Mapping[Probe, str], course: Course) -> int | None:
    """The next length between the ends of the bracket; None: they are close, or nothing between them may be tried."""
    edge, start, multiple = so_far(found), course.start, course.multiple
    low, high = edge.fits or 0, edge.fails or math.inf
    shortest = max(low // multiple * multiple + multiple, course.shortest)
    longest = min(course.longest, math.ceil(high / multiple) * multiple - multiple if edge.fails else LONGEST)
    close = 1 + course.settings.resolution
    if shortest > longest or (low and high <= low * close):
        return None
    if low * close < start < high / close:
        return start
    # steps away from the start, but no further than half way to an end that is known
    if start <= low * close:
        number = sum(start <= length <= low for length in _lengths(found, "ok"))
        aim = min(low * course.factor(number), (low + high) / 2)
    else:
        number = sum(high <= length <= start for length in _lengths(found, "oom"))
        aim = max(high / course.factor(number), (low + high) / 2 if low else 0)
    return min(max(course.rounded(aim), shortest), longest)


def _doubts(found: Mapping[Probe, str], low: int, high: int, longest: int) -> str:
    doubts = [UNCONFIRMED[status]] if (status := found.get(Probe(low, 1, confirming=True))) in UNCONFIRMED else []
    if high in _lengths(found, "ok"):
        ran, failed = ({probe.confirming for probe in _probes(found, high, ended)} for ended in ("ok", "oom"))
        whole = (ran, failed) == ({False}, {True})
        doubts.append(f"{high:,} {'fits without attention, and a whole step does not' if whole else 'ran at times'}")
    doubts += [f"{length:,} was out of memory" for length in sorted(_lengths(found, "oom")) if length < low]
    if high > longest:
        doubts.append(f"this search tried no length beyond {longest:,}")
    return ", ".join(doubts)
