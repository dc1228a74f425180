"""Searches for the longest sequence on this machine: what is known of them, and their run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sp_bench import hardware
from sp_bench.config.documents import MAX_DOCUMENTS
from sp_bench.costs import memory
from sp_bench.driver import to_run
from sp_bench.driver.attempt import Campaign, Driver
from sp_bench.driver.filling import fill
from sp_bench.driver.progress import search_names
from sp_bench.planning import identity, proofs
from sp_bench.planning.device_time import minutes, trial_time
from sp_bench.planning.machine import Machine
from sp_bench.planning.plan import Trial
from sp_bench.planning.search import LONGEST, Edge, Probe, Search, next_step, probes_ahead, so_far
from sp_bench.rows import store


class Searching:
    """A search on this machine: what rows say of it, how many probes it will take, and its run."""

    def __init__(self, name: str, search: Search, campaign: Campaign, machine: Machine) -> None:
        self.name, self.search = name, search
        self._campaign, self._machine = campaign, machine
        self.edge: Edge | None = None  # as far as this run knows
        self.probed: dict[str, Trial] = {}  # by trial_id: what it tried, or found in rows
        self._look()

    def _look(self) -> None:
        """Read what is known: from rows of this environment, and the memory model."""
        search, machine, settings = self.search, self._machine, self._campaign.settings.search
        host_bytes = hardware.free_host_bytes() if machine.smallest_gpu_bytes else None
        guess = search.guess(machine.gpu_bytes(search.config), host_bytes, settings.start)
        longest, self.limit = _limit(search, self._campaign, machine)  # limit: why nothing longer is tried, in words
        self.course = search.course(guess, replace(settings, longest=longest))
        self.tried = _tried(search, self._campaign)
        self.known = len(self.tried)  # of them without a trial of this run
        self.unsupported_reason: str | None = None  # of the next probe
        step = self.step
        # If the search is only planned, what this machine lacks does not matter; a missing proof does. A refused whole
        # step ends nothing.
        if isinstance(step, Probe) and not step.confirming:
            folder = self._campaign.settings.proofs_folder
            self.unsupported_reason = (
                proofs.missing_reason(search.at(step.seq_len), folder)
                if self.elsewhere
                else self._trial(step).unsupported_reason
            )

    def _trial(self, probe: Probe) -> Trial:
        config = self.search.at(probe.seq_len, confirming=probe.confirming)
        return self._machine.plan([config], probe.replicate + 1)[probe.replicate]

    @property
    def elsewhere(self) -> bool:
        """Whether it is only planned, for GPUs that are not here."""
        return self._machine.gpus is None and self.search.config.hardware.device == "cuda"

    @property
    def step(self) -> Probe | Edge:
        """The next probe, or the end of the search."""
        return next_step(self.tried, self.course, self.known)

    @property
    def ahead(self) -> list[Probe]:
        """The probes that are left, by estimate; none if the next cannot run."""
        return [] if self.unsupported_reason else probes_ahead(self.tried, self.course, self.known)

    @property
    def left_s(self) -> float | None:
        """Estimated seconds of the remaining probes. 0 if none remain or the next cannot run; None if unknown."""
        if isinstance(step := self.step, Edge):
            return 0.0
        config = self.search.at(step.seq_len, confirming=step.confirming)
        if self._machine.refusal(config) is not None:
            return 0.0
        probe = trial_time(config, self._machine.device_name)
        return None if probe is None else len(self.ahead) * probe.whole

    @property
    def words(self) -> str:
        """What is known of the search and how many probes it will take, for the plan."""
        rows = f"{self.known} row{'s' * (self.known != 1)} here: {so_far(self.tried).words}"
        if isinstance(step := self.step, Edge):
            return f"nothing to try; {rows}"
        if self.unsupported_reason:
            return f"from {step.seq_len:,} tokens, which end it as unsupported: {self.unsupported_reason}; {rows}"
        more = "" if not (seconds := self.left_s) else f", about {minutes(seconds)}"
        more += f"; up to {self.course.longest:,} tokens, since {self.limit}" if self.limit else ""
        if self.known:
            return f"from {rows}; next {step.seq_len:,} tokens, about {len(self.ahead)} probes{more}"
        doubt = ", where the memory model lets nothing fit" if self.course.guess == 0 else ""
        where = f"from {step.seq_len:,} tokens{self._counts_on(step.seq_len)}{doubt}"
        return f"{where}, about {len(self.ahead)} probes if they fit{more}"

    def _counts_on(self, seq_len: int) -> str:
        """The memory that is assumed of GPUs and hosts that are not here."""
        if not self.elsewhere:
            return ""
        config = self.search.at(seq_len)
        cap, gpu_bytes = config.hardware.device_memory_gib, self._machine.gpu_bytes(config)
        if cap is None and gpu_bytes is None:
            return f", since the memory of {config.hardware.name} is not known: give hardware.device_memory_gib"
        gib = min(cap or math.inf, gpu_bytes / 2**30 if gpu_bytes else math.inf)
        host_gib = memory.needed_on_host_bytes(config) / 2**30
        hosts = f" and hosts that hold {host_gib:,.0f} GiB" if host_gib else ""
        return f" on GPUs of {gib:,.1f} GiB{hosts}"

    @property
    def refusals(self) -> list[str]:
        """Says before any probe has cost anything which ones would be refused, and why: the longest of the lengths, and
        the longest of the whole steps that confirm them."""
        refused: dict[bool, tuple[int, str]] = {}
        for probe in sorted(self.ahead):
            if reason := self._machine.refusal(self.search.at(probe.seq_len, confirming=probe.confirming)):
                refused[probe.confirming] = probe.seq_len, reason
        ends = {False: "it would end at about", True: "it would end fit only, as no whole step can confirm about"}
        return [f"{ends[kind]} {seq_len:,} tokens: {reason}" for kind, (seq_len, reason) in sorted(refused.items())]

    @property
    def notes(self) -> list[str]:
        """Lines for the plan."""
        warned = [f"warning: search: {self.name}: {words}" for words in self.refusals]
        return [f"search: {self.name}: {self.words}", *warned]

    def run(self, driver: Driver, counted: set[str], write: Callable[[], None]) -> Edge:
        """Run the trials of the search, but for those that have rows. Returns where the edge is.

        counted: trial_ids that the progress has counted; those of this search are added. write: puts down what is
        known, before each probe, since SIGKILL may come at any moment.
        """
        self._look()
        progress = driver.progress
        refusal: str | None = None  # why the last probe was refused
        for probe, status in self.tried.items():
            trial = self._trial(probe)
            if trial.trial_id not in counted:
                progress.know(status)
            self._note(trial, counted)
        while isinstance(step := self.step, Probe):
            trial = self._trial(step)
            self._note(trial, counted)
            self.edge = so_far(self.tried)
            write()
            (state,) = to_run.states([trial], self._campaign)
            if state.next:
                ahead = probes_ahead(self.tried, self.course, self.known)
                budget = self.course.settings.max_probes - (len(self.tried) - self.known)
                progress.probe(f"search: {self.name}: {self.edge.words}; next {step.seq_len:,}", len(ahead), budget)
                progress.expect(trial)
                fill([state.next], driver)
                (state,) = to_run.states([trial], self._campaign)
            elif state.latest:
                self.known += 1
                progress.know(state.latest.status)
            assert state.latest is not None, "each attempt leaves a row"
            self.tried[step] = state.latest.status
            refusal = None if step.confirming else trial.unsupported_reason
        if refusal:
            step = replace(step, note=f"{step.note}: {refusal}")
        if self.limit and step.fits is not None and step.fails is None and step.fits >= self.course.longest:
            step = replace(step, note=f"{step.note}, since {self.limit}")
        self.edge = step
        return step

    def _note(self, trial: Trial, counted: set[str]) -> None:
        self.probed[trial.trial_id] = trial
        counted.add(trial.trial_id)


def begin(searches: Sequence[Search], campaign: Campaign, machine: Machine) -> list[Searching]:
    """The searches of a run."""
    names = search_names([search.config for search in searches])
    return [Searching(name, search, campaign, machine) for name, search in zip(names, searches, strict=True)]


def _limit(search: Search, campaign: Campaign, machine: Machine) -> tuple[int | None, str]:
    """The longest length to try, and why if that is not search.longest."""
    given, limits = campaign.settings.search.longest, []
    if search.longest + search.multiple <= LONGEST:
        limits.append((search.longest, f"a pack has at most {MAX_DOCUMENTS:,} documents; see workload.document_len"))
    will_run_here = machine.gpus is not None or search.config.hardware.device == "cpu"
    if will_run_here and (on_host := search.longest_on_host(hardware.host_bytes())) is not None:
        # Where the host holds no length, the shortest is planned, and its row says what it needs.
        limits.append((on_host or search.shortest, "the memory of this host holds no more"))
    first = min(limits, default=None)
    return first if first and first[0] < (given or math.inf) else (given, "")


def _tried(search: Search, campaign: Campaign) -> dict[Probe, str]:
    """The status of each probe that has a row of this environment, from listed trials, other searches or earlier
    runs."""
    env_id = identity.env_id(search.config)
    latest = store.latest(store.committed(campaign.folder)).values()
    names = {row.file_name for row in latest if row.env_id == env_id and row.status in ("ok", "oom")}
    if not names:
        return {}
    rows = store.read(campaign.folder, ("seq_len", "replicate", "status", "config"), names=names)[0].to_pylist()
    return {probe: row["status"] for row in rows if (probe := search.probe_of(row)) is not None}
