"""Searches for the longest sequence on this machine: what is known, what they will take, and their run."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sp_bench import hardware
from sp_bench.config.documents import MAX_DOCUMENTS
from sp_bench.costs import memory
from sp_bench.driver import identity
from sp_bench.driver.attempt import Attempt, Campaign, Driver
from sp_bench.driver.device_time import minutes, trial_s
from sp_bench.driver.filling import fill, latest_rows, next_attempt
from sp_bench.driver.machine import Machine
from sp_bench.driver.plan import Trial
from sp_bench.driver.progress import search_names
from sp_bench.driver.search import LONGEST, Course, Edge, Probe, Search, next_step, probes_ahead, so_far
from sp_bench.rows import store


class Bound(NamedTuple):
    """What ends the lengths that a search may try, before search.longest does."""

    longest: int
    why: str


@dataclass(frozen=True)
class Begun:
    """A search on this machine, and what is known before it goes on."""

    search: Search
    machine: Machine
    course: Course
    bound: Bound | None
    tried: dict[Probe, str]  # by rows of this environment
    unsupported_reason: str | None = None  # of what comes first

    @property
    def known(self) -> int:
        return len(self.tried)

    @property
    def elsewhere(self) -> bool:
        """Whether it is only planned, for GPUs that are not here."""
        return self.machine.gpus is None and self.search.config.hardware.device == "cuda"

    @property
    def step(self) -> Probe | Edge:
        """What comes first."""
        return next_step(self.tried, self.course, self.known)

    @property
    def ahead(self) -> list[Probe]:
        """About which probes are left."""
        return [] if self.unsupported_reason else probes_ahead(self.tried, self.course, self.known)

    @property
    def left(self) -> int:
        return len(self.ahead)

    @property
    def left_s(self) -> float | None:
        """Of the probes that are left; 0: none is, or the next cannot run. None: not on GPUs, or nothing says."""
        if isinstance(step := self.step, Edge):
            return 0.0
        config = self.search.at(step.seq_len, confirming=step.confirming)
        if self.machine.refusal(config) is not None:
            return 0.0
        probe_s = trial_s(config, self.machine.device_name)
        return None if probe_s is None else self.left * probe_s

    @property
    def words(self) -> str:
        """What it will take, for the plan."""
        rows = f"{self.known} row{'s' * (self.known != 1)} here: {so_far(self.tried).words}"
        if isinstance(step := self.step, Edge):
            return f"nothing to try; {rows}"
        if self.unsupported_reason:
            return f"from {step.seq_len:,} tokens, which end it as unsupported: {self.unsupported_reason}; {rows}"
        told = "" if not (seconds := self.left_s) else f", about {minutes(seconds)}"
        told += f"; up to {self.course.longest:,} tokens, since {self.bound.why}" if self.bound else ""
        if self.known:
            return f"from {rows}; next {step.seq_len:,} tokens, about {self.left} probes{told}"
        doubt = ", where the memory model lets nothing fit" if self.course.guess == 0 else ""
        where = f"from {step.seq_len:,} tokens{self._counts_on(step.seq_len)}{doubt}"
        return f"{where}, about {self.left} probes if they fit{told}"

    def _counts_on(self, seq_len: int) -> str:
        """What GPUs and hosts that are not here are taken to have."""
        if not self.elsewhere:
            return ""
        config = self.search.at(seq_len)
        cap, gpu_bytes = config.hardware.device_memory_gib, self.machine.gpu_bytes(config)
        if cap is None and gpu_bytes is None:
            return f", since the memory of {config.hardware.name} is not known: give hardware.device_memory_gib"
        gib = min(cap or math.inf, gpu_bytes / 2**30 if gpu_bytes else math.inf)
        host_gib = memory.needed_on_host_bytes(config) / 2**30
        hosts = f" and hosts that hold {host_gib:,.0f} GiB" if host_gib else ""
        return f" on GPUs of {gib:,.1f} GiB{hosts}"

    @property
    def refusals(self) -> list[str]:
        """Of the probes that it will probably try, and of the whole steps that confirm them, the longest that would
        not run, and why: before the others have cost anything."""
        told: dict[bool, tuple[int, str]] = {}
        for probe in sorted(self.ahead):
            if reason := self.machine.refusal(self.search.at(probe.seq_len, confirming=probe.confirming)):
                told[probe.confirming] = probe.seq_len, reason
        ends = {False: "it would end at about", True: "it would end fit only, as no whole step can confirm about"}
        return [f"{ends[kind]} {seq_len:,} tokens: {reason}" for kind, (seq_len, reason) in sorted(told.items())]


def begin(search: Search, campaign: Campaign, machine: Machine) -> Begun:
    """What is known of a search, by the rows of its campaign and the memory model, and what would come first here."""
    asked, bound = campaign.settings.search, _bound(search, campaign, machine)
    host_bytes = hardware.free_host_bytes() if machine.smallest_gpu_bytes else None
    guess = search.guess(machine.gpu_bytes(search.config), host_bytes, asked.start)
    within = asked if bound is None else replace(asked, longest=bound.longest)
    begun = Begun(search, machine, search.course(guess, within), bound, _tried(search, campaign))
    step = begun.step
    # What this machine lacks is no matter where a search is only planned; a whole step that it refuses is no end.
    if isinstance(step, Edge) or step.confirming or begun.elsewhere:
        return begun
    return replace(begun, unsupported_reason=_trial_of(step, search, machine).unsupported_reason)


def _trial_of(probe: Probe, search: Search, machine: Machine) -> Trial:
    config = search.at(probe.seq_len, confirming=probe.confirming)
    return machine.plan([config], probe.replicate + 1)[probe.replicate]


def _bound(search: Search, campaign: Campaign, machine: Machine) -> Bound | None:
    bounds = []
    if search.longest + search.multiple <= LONGEST:
        bounds.append(
            Bound(search.longest, f"a pack has at most {MAX_DOCUMENTS:,} documents; see workload.document_len")
        )
    will_run_here = machine.gpus is not None or search.config.hardware.device == "cpu"
    if will_run_here and (on_host := search.longest_on_host(hardware.host_bytes())) is not None:
        # Where the host holds no length, the shortest is planned, and its row says what it needs.
        bounds.append(Bound(on_host or search.shortest, "the memory of this host holds no more"))
    first = min(bounds, default=None)
    return first if first and first.longest < (campaign.settings.search.longest or math.inf) else None


def _tried(search: Search, campaign: Campaign) -> dict[Probe, str]:
    """The lengths of which rows of this environment say whether they fit: of listed trials, of other searches and of
    earlier runs."""
    env_id = identity.env_id(search.config)
    latest = store.latest(store.committed(campaign.folder)).values()
    names = {row.file_name for row in latest if row.env_id == env_id and row.status in ("ok", "oom")}
    if not names:
        return {}
    rows = store.read(campaign.folder, ("seq_len", "replicate", "status", "config"), names=names)[0].to_pylist()
    return {probe: row["status"] for row in rows if (probe := search.probe_of(row)) is not None}


class Searching:
    """The searches of a run, one after the other."""

    def __init__(self, searches: Sequence[Search], campaign: Campaign, machine: Machine) -> None:
        self._searches = dict(zip(search_names([each.config for each in searches]), searches, strict=True))
        self._campaign, self._machine = campaign, machine
        self.edges: dict[str, Edge | None] = dict.fromkeys(self._searches)  # as far as this run knows
        self.probed: dict[str, Trial] = {}  # by trial_id
        self.said: list[str] = []  # of each that came to its end or was stopped by its settings

    @property
    def unended(self) -> int:
        return sum(not (edge and edge.ended) for edge in self.edges.values())

    def left(self) -> list[int]:
        """Of each, about how many probes."""
        return [begin(search, self._campaign, self._machine).left for search in self._searches.values()]

    def run(self, driver: Driver, left: Sequence[int], listed: Collection[str], write: Callable[[], None]) -> None:
        """left: as it was before the listed trials ran. listed: trial_ids of the trials of this run that are of no
        search. write: puts down what is known, before each probe too, since SIGKILL may come at any moment."""
        for number, name in enumerate(self._searches, 1):
            driver.progress.later = sum(left[number:])
            edge = self.edges[name] = self._run(name, driver, listed, write)
            self.said.append(f"longest: {name}: {edge.words}")
            write()

    def _run(self, name: str, driver: Driver, listed: Collection[str], write: Callable[[], None]) -> Edge:
        """Run the trials of a search, but for those that have rows. Returns where the edge is."""
        search, machine, campaign, progress = self._searches[name], self._machine, self._campaign, driver.progress
        begun = begin(search, campaign, machine)
        course, statuses, known = begun.course, dict(begun.tried), begun.known
        reason: str | None = None  # why the last probe was refused
        for probe, status in begun.tried.items():
            if (trial := _trial_of(probe, search, machine)).trial_id not in {*listed, *self.probed}:
                progress.know(status)
            self.probed[trial.trial_id] = trial
        while isinstance(step := next_step(statuses, course, known), Probe):
            trial = _trial_of(step, search, machine)
            self.probed[trial.trial_id] = trial
            self.edges[name] = so_far(statuses)
            write()
            (row,) = latest_rows([trial], campaign)
            if (number := next_attempt(row, trial, campaign.settings)) is not None:
                ahead = probes_ahead(statuses, course, known)
                left = len(ahead), course.settings.max_probes - (len(statuses) - known)
                progress.probe(f"search: {name}: {so_far(statuses).words}; next {step.seq_len:,}", *left)
                progress.expect(trial)
                fill([Attempt(trial, campaign.env_id(trial), number)], driver)
                (row,) = latest_rows([trial], campaign)
            elif row is not None:
                known += 1
                progress.know(row.status)
            assert row is not None, "each attempt leaves a row"
            statuses[step] = row.status
            reason = None if step.confirming else trial.unsupported_reason
        if reason:
            step = replace(step, note=f"{step.note}: {reason}")
        if begun.bound and step.fits is not None and step.fails is None and step.fits >= course.longest:
            step = replace(step, note=f"{step.note}, since {begun.bound.why}")
        return step
