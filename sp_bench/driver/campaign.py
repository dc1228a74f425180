"""A campaign: plan its trials, skip those that have rows, run the rest, make the report."""

import itertools
import json
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sp_bench import hardware
from sp_bench.config.documents import MAX_DOCUMENTS, MULTIPLE, from_text
from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import allocation, attempt, derived, identity, nodes, plan
from sp_bench.driver.attempt import Attempt, Campaign, Driver, StorageError
from sp_bench.driver.claims import FOLDER, REPORT, Claims
from sp_bench.driver.device_time import minutes, trial_s
from sp_bench.driver.plan import Trial
from sp_bench.driver.progress import Progress, layout, number_of, plan_as_json, search_names, show_plan, summary
from sp_bench.driver.search import LONGEST, Course, Edge, Probe, Search, next_step, probes_ahead, so_far
from sp_bench.driver.settings import CampaignConfig
from sp_bench.driver.signals import Interrupted, Signals
from sp_bench.rows import plans, store
from sp_bench.rows.plans import PlannedTrial
from sp_bench.rows.store import RowName, require_contained

RETRIED = ("preempted", "timeout", "error")  # by `resume`; with another status a trial would end the same way
POLL_S = 0.5  # between looks at what other runs have committed


class Reporter(Protocol):
    """Makes the report of a campaign's folder. The command line brings it, since the driver draws nothing."""

    def effort(self, folder: Path) -> str:
        """Which part of the campaign's wall time was measurement, over all its runs; empty without rows."""
        ...

    def build(self, folder: Path) -> Iterable[str]:
        """Make the report and return lines for the user: files that could not be read, and where the page is."""
        ...


@dataclass(frozen=True)
class _State:
    """What a campaign is before a run begins."""

    campaign: Campaign
    found: hardware.Gpus | None
    trials: list[Trial]
    rows: list[RowName | None]  # of each trial the latest
    numbers: list[int | None]  # of each trial its next attempt; None: it is done
    notes: list[str]

    @property
    def shown(self) -> tuple[list[Trial], list[str | None], list[str]]:
        """The trials, of each the status that counts as done, and what to tell beside them."""
        pairs = zip(self.rows, self.numbers, strict=True)
        return self.trials, [row.status if row and number is None else None for row, number in pairs], self.notes


def planned(
    configs: Sequence[TrialConfig], settings: CampaignConfig, searches: Sequence[Search] = ()
) -> tuple[list[Trial], list[str | None], list[str]]:
    """What `run` would do: the trials, of each the status of the row that counts as done, and what to tell beside them.

    Raises:
        ConfigError: a config that no trial can have.
    """
    return _state(configs, settings, searches).shown


def _state(configs: Sequence[TrialConfig], settings: CampaignConfig, searches: Sequence[Search]) -> _State:
    every = [*configs, *(search.config for search in searches)]
    kinds = {config.hardware.device for config in every}
    found = hardware.gpus() if "cuda" in kinds else None
    require_devices(every, found, settings)
    require_contained(settings.folder)
    campaign = Campaign(settings, settings.folder, *hardware.git_state())
    trials = _planned(configs, settings.replicates, settings, found)
    rows = _latest_rows(trials, campaign)
    numbers = [next_attempt(row, trial, settings) for row, trial in zip(rows, trials, strict=True)]
    gpu_bytes = _smallest_gpu_bytes(found)
    notes = [f"warning: {words}" for words in plan.warnings(trials, len(os.sched_getaffinity(0)), gpu_bytes)]
    notes += _measured_elsewhere([trial for trial, row in zip(trials, rows, strict=True) if row is None], campaign)
    notes += _unknown_rates(trials, found)
    notes += _of_packs(trials)
    names = search_names([search.config for search in searches])
    begun = [_begun(search, campaign, found) for search in searches]
    for name, each in zip(names, begun, strict=True):
        notes.append(f"search: {name}: {_search_words(each, settings, found)}")
        notes += [f"warning: search: {name}: {words}" for words in _search_refusals(each, settings, found)]
    notes += _device_time(trials, numbers, begun, settings, found)
    return _State(campaign, found, trials, rows, numbers, notes)


def _planned(
    configs: Sequence[TrialConfig], replicates: int, settings: CampaignConfig, found: hardware.Gpus | None
) -> list[Trial]:
    return plan.plan(
        configs,
        replicates,
        settings.order_seed,
        num_gpus=len(found.devices) if found else None,
        host_bytes=hardware.host_bytes(),
        device_name=_device_name(found),
        measure_s=settings.deadlines.measure,
        warmup_s=settings.deadlines.warmup,
        num_hosts=allocation.here().num_hosts,
    )


def run(
    configs: Sequence[TrialConfig],
    settings: CampaignConfig,
    reporter: Reporter | None,
    searches: Sequence[Search] = (),
    *,
    as_json: bool = False,
    only: Collection[str] | None = None,
    hear: Callable[[Path, Mapping[str, Any]], None] = lambda campaign, row: None,
) -> Counter[str]:
    """Leave one row of this environment for every trial, and then for every length that a search tries. Other runs of
    the campaign may share the work. Returns how many trials ended in which status, by their latest rows.

    With `resume`, try again some trials that failed. With `plan_only`, show what would run, perhaps as JSON, and launch
    nothing; nothing is counted. Without a reporter, no report is made. `only`: trial_ids of the planned trials that
    this run is for, such as those of one job; None: all. `hear` is told of each row that this run commits.

    Raises:
        ConfigError: a config that no trial can have, or a results folder that cannot be written; nothing is launched.
        StorageError: the folder cannot be written any more; committed rows stay.
        SystemExit: 128 and the number of the signal that ended the run, as in shells; committed rows stay.
    """
    state = _state(configs, settings, searches)
    trials, rows, numbers, found, campaign = state.trials, state.rows, state.numbers, state.found, state.campaign
    if settings.plan_only:
        if as_json:
            print(json.dumps(plan_as_json(*state.shown), indent=1))
        else:
            show_plan(*state.shown)
        return Counter()
    for note in state.notes:
        print(note)
    _require_planned(only or (), trials)

    listed, names = list(trials), search_names([search.config for search in searches])
    edges: dict[str, Edge | None] = dict.fromkeys(names)  # of the searches, as far as this run knows
    _write_plan(campaign, listed, edges)
    if only is not None:  # the plan beside the rows is of all, so that `status` and reports know what is missing
        kept = [n for n, trial in enumerate(trials) if trial.trial_id in only]
        trials, rows, numbers = [trials[n] for n in kept], [rows[n] for n in kept], [numbers[n] for n in kept]
    attempts = [Attempt(t, campaign.env_id(t), n) for t, n in zip(trials, numbers, strict=True) if n is not None]
    before = [row.status for row, number in zip(rows, numbers, strict=True) if row and number is None]
    on_cpu = any(c.hardware.device == "cpu" for c in [*configs, *(search.config for search in searches)])
    devices = ("cpu",) * on_cpu + tuple(gpu.uuid for gpu in (found.devices if found else ()))
    try:
        with Claims(campaign.work / FOLDER) as claims:
            killed = interrupted = False
            planned = {trial.trial_id: trial for trial in trials}
            signals = Signals()
            with signals, Progress([each.planned for each in attempts], before) as progress, ExitStack() as held:
                said: list[str] = []
                probed: dict[str, Trial] = {}

                def record(name: str, edge: Edge) -> None:
                    edges[name] = edge
                    _write_plan(campaign, listed, edges, probed)

                try:
                    asked = [*(each.planned.config for each in attempts), *(search.config for search in searches)]
                    hosts = held.enter_context(_joined(asked, campaign, signals))
                    driver = Driver(campaign, claims, signals, progress, devices, hear, hosts)
                    left = [_begun(search, campaign, found).left for search in searches]
                    progress.later = sum(left)
                    _fill(attempts, driver)
                    for number, (name, search) in enumerate(zip(names, searches, strict=True), 1):
                        progress.later = sum(left[number:])
                        # before each probe too, since SIGKILL may come at any moment
                        edge = _search(name, search, driver, found, planned.keys(), probed, partial(record, name))
                        said.append(f"longest: {name}: {edge.words}")
                        record(name, edge)
                except Interrupted:
                    interrupted = True
                except KeyboardInterrupt:  # a second Ctrl-C: stop at once
                    killed = True
            if not killed:
                effort = reporter.effort(campaign.folder) if reporter else ""
                print(summary(campaign.folder, progress, effort, interrupted=interrupted))
                for line in said:
                    print(line)
                if interrupted and (unended := [edge for edge in edges.values() if not (edge and edge.ended)]):
                    print(f"{len(unended)} of {len(names)} searches did not end; the words of this run go on with them")
            latest = [row for row in _latest_rows([*(planned | probed).values()], campaign) if row]
            _say_how_to_retry(latest, settings.max_attempts)
            if killed or interrupted:
                raise SystemExit(signals.exit_code)
            if reporter and claims.take(REPORT, lambda: False) is None:
                print(f"report: another run is making that of {campaign.folder}")
            elif reporter:
                for line in reporter.build(campaign.folder):
                    print(line)
            return Counter(row.status for row in latest)
    except OSError as error:
        raise StorageError(campaign.folder, error) from error


def _joined(
    asked: Sequence[TrialConfig], campaign: Campaign, signals: Signals
) -> AbstractContextManager[nodes.Nodes | None]:
    """All hosts of this run, while open; None where it needs no other host."""
    hosts = allocation.here()
    needed = hosts.by == "torchrun" or max((config.num_nodes for config in asked), default=1) > 1
    if hosts.num_hosts == 1 or not needed:  # what torchrun started waits for a driver, needed or not
        return nullcontext()
    own = hardware.environment("cuda", os.environ)
    return nodes.joined(hosts, campaign.folder, own, signals.check)


def _write_plan(
    campaign: Campaign,
    trials: Sequence[Trial],
    edges: Mapping[str, Edge | None],
    probes: Iterable[str] = (),
) -> None:
    """Make the campaign's folder, and write what is planned beside its rows. edges: of each search what is known; None:
    nothing yet. probes: trial_ids of what they tried.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        campaign.work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=campaign.folder):
            pass
        planned = [PlannedTrial(t.trial_id, campaign.env_id(t), t.config.method.name) for t in trials]
        ended = {name: edge is not None and edge.ended for name, edge in edges.items()}
        brackets = {name: edge.words for name, edge in edges.items() if edge}
        plans.write(campaign.folder, planned, ended, probes, brackets)
    except OSError as error:
        raise ConfigError(
            f"cannot write results to {campaign.folder}: {error.strerror}; see results_root and campaign"
        ) from error


def _require_planned(only: Collection[str], trials: Sequence[Trial]) -> None:
    """Refuse words of another sweep than that whose trials are asked for."""
    if unknown := set(only) - {trial.trial_id for trial in trials}:
        raise ConfigError(
            f"{len(unknown)} of the {len(only)} trials of the pack are not in this plan of {len(trials)}, such as "
            f"{min(unknown)}; give the words of the submission, with the code and the files that it had"
        )


def require_devices(configs: Sequence[TrialConfig], found: hardware.Gpus | None, settings: CampaignConfig) -> None:
    """Refuse hardware that is not in this machine: rows name the hardware that was asked for.

    Without an NVIDIA driver, a plan can still be shown, and trials on the CPU can run.
    """
    kinds = sorted({config.hardware.name for config in configs if config.hardware.device == "cuda"})
    if found is None:
        if not settings.plan_only and all(config.hardware.device == "cuda" for config in configs):
            raise ConfigError(
                f"hardware={', '.join(kinds)} needs CUDA devices, and there is no NVIDIA driver here: run this on the "
                "machine that has them, or use hardware=cpu; `sp-bench plan` shows what would run"
            )
        return
    for model, kind in itertools.product(sorted({gpu.name for gpu in found.devices}), kinds):
        if not hardware.describes(kind, model):
            raise ConfigError(
                f"hardware={kind}, but this machine has {model}; use hardware=device, or the file of conf/hardware of "
                "that name"
            )


def _unknown_rates(trials: Sequence[Trial], found: hardware.Gpus | None) -> list[str]:
    """A line for each kind of GPU here whose peak rate no datasheet told us, for the dtypes that are asked for."""
    dtypes = sorted({trial.config.dtype for trial in trials if trial.config.hardware.device == "cuda"})
    models = sorted({gpu.name for gpu in found.devices}) if found else []
    return [
        f"warning: no peak rate of {model} in {dtype} is known: mfu and hfu are null"
        for model, dtype in itertools.product(models, dtypes)
        if hardware.peak_flops(model, dtype) is None
    ]


def _of_packs(trials: Sequence[Trial]) -> list[str]:
    """A line for each pack of documents and number of ranks: what is in it, and how unevenly methods cut its work."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, None]] = {}
    for config in {trial.cell_id: trial.config for trial in trials if trial.unsupported_reason is None}.values():
        pack = derived.of_documents(config)
        if pack and config.sp_size > 1:
            of_seed = f" of seed {config.seed}" if config.workload.packing == "lognormal" else ""
            what = (
                f"pack{of_seed} of {config.seq_len:,} tokens: {pack['num_documents']} documents, "
                f"{pack['median_document']:,.0f} tokens in median, {pack['longest_document']:,} at most"
                f"{_left_out(config)}; attention of the busiest of {config.sp_size} ranks over the mean"
            )
            share = f"{config.method.name} {layout(config)} {pack['flops_imbalance']:.2f}"
            found.setdefault((what, config.documents(config.seq_len)), {})[share] = None
    return [f"{what}: {', '.join(shares)}" for (what, _), shares in found.items()]


def _left_out(config: TrialConfig) -> str:
    """What of a list of documents is beyond the end of the pack."""
    lens = config.workload.document_lens
    beyond = sum(from_text(lens)) - config.seq_len if lens is not None else 0
    return f" (the list has {beyond:,} tokens more, which are left out)" if beyond >= MULTIPLE else ""


def _latest_rows(trials: Sequence[Trial], campaign: Campaign) -> list[RowName | None]:
    """The row of the last attempt at each trial in this environment."""
    latest = store.latest(store.committed(campaign.folder))
    return [latest.get((trial.trial_id, campaign.env_id(trial))) for trial in trials]


def next_attempt(latest: RowName | None, trial: Trial, settings: CampaignConfig) -> int | None:
    """The number of the next attempt at a trial, given the row of the last one; None: make none.

    An unsupported trial is attempted once nothing stands in its way any more: a machine may have had too few devices.
    """
    if latest is None:
        return 0
    if latest.status == "unsupported":
        return None if trial.unsupported_reason else latest.attempt + 1
    again = settings.resume and latest.status in RETRIED and latest.attempt + 1 < settings.max_attempts
    return latest.attempt + 1 if again else None


def _measured_elsewhere(without_row: Sequence[Trial], campaign: Campaign) -> list[str]:
    """A line that says why trials run although the campaign has rows of them; none where it has none."""
    asked = {trial.trial_id: campaign.env_id(trial) for trial in without_row}
    committed = store.committed(campaign.folder)  # another run may have added rows of this environment meanwhile
    found = {row.trial_id for row in committed if asked.get(row.trial_id, row.env_id) != row.env_id}
    if not found:
        return []
    return [
        f"{number_of(len(found))} of {len(asked):,} to run had been measured before, but with other libraries, on "
        "another device or with other code. Those rows stay; a report shows the newest of each cell"
    ]


def _fill(attempts: Sequence[Attempt], driver: Driver) -> None:
    """Run what no other run has claimed; wait for the rows of what others have claimed."""
    left = {each.key: each for each in attempts}
    while left:
        driver.signals.check()
        before = len(left)
        for each in [a for a in left.values() if a.planned.unsupported_reason]:
            driver.signals.check()
            if ended := attempt.refuse(each, driver):
                driver.progress.finish(each.planned, *ended)
                del left[each.key]
        for each in attempt.run_next([a for a in left.values() if not a.planned.unsupported_reason], driver):
            del left[each.key]
        for row in store.committed(driver.campaign.folder) if left else ():
            if each := left.pop(f"{row.trial_id}-{row.env_id}-{row.attempt}", None):
                driver.progress.finish_elsewhere(each.planned, row.status)
        if len(left) < before:
            continue
        if holders := driver.claims.holders():
            driver.progress.note(f"waiting for {number_of(len(left))} of other runs: {', '.join(holders)}")
        end = time.monotonic() + POLL_S * random.uniform(1, 2)  # two runs that want the same trial must not keep step
        while time.monotonic() < end:
            driver.signals.check()
            time.sleep(0.1)


class _Bound(NamedTuple):
    """What ends the lengths that a search may try, before search.longest does."""

    longest: int
    why: str


@dataclass(frozen=True)
class _Begun:
    """A search on this machine, and what is known before it goes on."""

    search: Search
    course: Course
    bound: _Bound | None
    tried: dict[Probe, str]  # by rows of this environment
    unsupported_reason: str | None  # of what comes first

    @property
    def known(self) -> int:
        return len(self.tried)

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


def _begun(search: Search, campaign: Campaign, found: hardware.Gpus | None) -> _Begun:
    asked, gpu_bytes = campaign.settings.search, _smallest_gpu_bytes(found)
    bound = _bound(search, campaign, found)
    guess = search.guess(gpu_bytes, hardware.free_host_bytes() if gpu_bytes else None, asked.start)
    within = asked if bound is None else replace(asked, longest=bound.longest)
    begun = _Begun(search, search.course(guess, within), bound, _tried(search, campaign), None)
    step = begun.step
    # What this machine lacks is no matter where a search is only planned; a whole step that it refuses is no end.
    elsewhere = found is None and search.config.hardware.device == "cuda"
    if isinstance(step, Edge) or step.confirming or elsewhere:
        return begun
    return replace(begun, unsupported_reason=_trial_of(step, search, campaign, found).unsupported_reason)


def _trial_of(probe: Probe, search: Search, campaign: Campaign, found: hardware.Gpus | None) -> Trial:
    config = search.at(probe.seq_len, confirming=probe.confirming)
    return _planned([config], probe.replicate + 1, campaign.settings, found)[probe.replicate]


def _bound(search: Search, campaign: Campaign, found: hardware.Gpus | None) -> _Bound | None:
    bounds = []
    if search.longest + search.multiple <= LONGEST:
        bounds.append(
            _Bound(search.longest, f"a pack has at most {MAX_DOCUMENTS:,} documents; see workload.document_len")
        )
    will_run_here = found is not None or search.config.hardware.device == "cpu"
    if will_run_here and (on_host := search.longest_on_host(hardware.host_bytes())) is not None:
        # Where the host holds no length, the shortest is planned, and its row says what it needs.
        bounds.append(_Bound(on_host or search.shortest, "the memory of this host holds no more"))
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


def _search(
    name: str,
    search: Search,
    driver: Driver,
    found: hardware.Gpus | None,
    listed: Collection[str],
    probed: dict[str, Trial],
    before_probe: Callable[[Edge], None],
) -> Edge:
    """Run the trials of a search, but for those that have rows, and add all of them to `probed`, by trial_id, before
    they run. Returns where the edge is. listed: trial_ids of the trials of this run that are of no search.
    before_probe: hears what is known of the edge before each trial."""
    settings, campaign, progress = driver.campaign.settings, driver.campaign, driver.progress
    begun = _begun(search, campaign, found)
    course, statuses, known = begun.course, dict(begun.tried), begun.known
    reason: str | None = None  # why the last probe was refused
    for probe, status in begun.tried.items():
        if (trial := _trial_of(probe, search, campaign, found)).trial_id not in {*listed, *probed}:
            progress.know(status)
        probed[trial.trial_id] = trial
    while isinstance(step := next_step(statuses, course, known), Probe):
        trial = _trial_of(step, search, campaign, found)
        probed[trial.trial_id] = trial
        before_probe(so_far(statuses))
        (row,) = _latest_rows([trial], campaign)
        if (number := next_attempt(row, trial, settings)) is not None:
            ahead = probes_ahead(statuses, course, known)
            left = len(ahead), course.settings.max_probes - (len(statuses) - known)
            progress.probe(f"search: {name}: {so_far(statuses).words}; next {step.seq_len:,}", *left)
            progress.expect(trial)
            _fill([Attempt(trial, campaign.env_id(trial), number)], driver)
            (row,) = _latest_rows([trial], campaign)
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


def _smallest_gpu_bytes(found: hardware.Gpus | None) -> int | None:
    return min((gpu.memory_bytes for gpu in found.devices), default=None) if found else None


def _device_name(found: hardware.Gpus | None) -> str | None:
    return found.devices[0].name if found and found.devices else None


def _device_time(
    trials: Sequence[Trial],
    numbers: Sequence[int | None],
    begun: Sequence[_Begun],
    settings: CampaignConfig,
    found: hardware.Gpus | None,
) -> list[str]:
    """How long what is left would keep GPUs busy. Without GPUs here, as on a login node, what any machine could run
    counts."""
    left = [trial for trial, number in zip(trials, numbers, strict=True) if number is not None]
    refused = {trial.cell_id: _refusal(trial.config, settings, found) for trial in left}
    asked = [trial.config for trial in left if refused[trial.cell_id] is None]
    listed = [seconds for config in asked if (seconds := trial_s(config, _device_name(found))) is not None]
    searched = [seconds for each in begun if (seconds := _search_s(each, settings, found))]
    if not listed and not searched:
        return []
    counts = [number_of(len(listed))] if listed else []
    counts += [f"{len(searched)} search{'es' * (len(searched) != 1)}"] if searched else []
    return [f"devices: {' and '.join(counts)} on GPUs, about {minutes(sum(listed) + sum(searched))}"]


def _refusal(config: TrialConfig, settings: CampaignConfig, found: hardware.Gpus | None) -> str | None:
    """Why a trial would not run here, or without GPUs here, on any machine that has them."""
    if _device_name(found) is None and config.hardware.device == "cuda":
        return plan.reason_anywhere(config, settings.deadlines.measure, settings.deadlines.warmup)
    (trial,) = _planned([config], 1, settings, found)
    return trial.unsupported_reason


def _search_refusals(begun: _Begun, settings: CampaignConfig, found: hardware.Gpus | None) -> list[str]:
    """Of the probes that a search will probably try, and of the whole steps that confirm them, the longest that would
    not run, and why: before the others have cost anything."""
    told: dict[bool, tuple[int, str]] = {}
    for probe in sorted(begun.ahead):
        config = begun.search.at(probe.seq_len, confirming=probe.confirming)
        if reason := _refusal(config, settings, found):
            told[probe.confirming] = probe.seq_len, reason
    ends = {False: "it would end at about", True: "it would end fit only, as no whole step can confirm about"}
    return [f"{ends[kind]} {seq_len:,} tokens: {reason}" for kind, (seq_len, reason) in sorted(told.items())]


def _search_s(begun: _Begun, settings: CampaignConfig, found: hardware.Gpus | None) -> float | None:
    """Of the probes that are left; 0: none is, or the next cannot run. None: not on GPUs, or nothing says."""
    if isinstance(step := begun.step, Edge):
        return 0.0
    config = begun.search.at(step.seq_len, confirming=step.confirming)
    if _refusal(config, settings, found) is not None:
        return 0.0
    probe_s = trial_s(config, _device_name(found))
    return None if probe_s is None else begun.left * probe_s


def _search_words(begun: _Begun, settings: CampaignConfig, found: hardware.Gpus | None) -> str:
    """What a search will take, for the plan."""
    rows = f"{begun.known} row{'s' * (begun.known != 1)} here: {so_far(begun.tried).words}"
    if isinstance(step := begun.step, Edge):
        return f"nothing to try; {rows}"
    if begun.unsupported_reason:
        return f"from {step.seq_len:,} tokens, which end it as unsupported: {begun.unsupported_reason}; {rows}"
    seconds = _search_s(begun, settings, found)
    told = "" if not seconds else f", about {minutes(seconds)}"
    told += f"; up to {begun.course.longest:,} tokens, since {begun.bound.why}" if begun.bound else ""
    if begun.known:
        return f"from {rows}; next {step.seq_len:,} tokens, about {begun.left} probes{told}"
    doubt = ", where the memory model lets nothing fit" if begun.course.guess == 0 else ""
    return f"from {step.seq_len:,} tokens{doubt}, about {begun.left} probes if they fit{told}"


def _say_how_to_retry(latest: Sequence[RowName], most: int) -> None:
    """Print what to do about trials whose last attempt failed."""
    failed = [row for row in latest if row.status in RETRIED]
    spent = sum(row.attempt + 1 >= most for row in failed)
    if again := len(failed) - spent:
        print(f"{number_of(again)} failed; `sp-bench resume` with the words of this run tries again")
    if spent:
        print(f"{number_of(spent)} failed max_attempts={most} times; a larger one lets `resume` try again")
