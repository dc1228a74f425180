"""A campaign: plan its trials, skip those that have rows, run the rest, make the report."""

import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sp_bench import hardware
from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import nodes, searching, to_run
from sp_bench.driver.attempt import Campaign, Driver, StorageError
from sp_bench.driver.claims import FOLDER, REPORT, Claims
from sp_bench.driver.command_record import record
from sp_bench.driver.filling import fill
from sp_bench.driver.notes import notes
from sp_bench.driver.progress import Progress, plan_as_json, show_plan, summary
from sp_bench.driver.searching import Searching
from sp_bench.driver.signals import Interrupted, Signals
from sp_bench.driver.to_run import RETRIED, TrialState
from sp_bench.formats import counted
from sp_bench.planning import allocation
from sp_bench.planning.machine import Machine
from sp_bench.planning.plan import Trial
from sp_bench.planning.search import Search
from sp_bench.planning.settings import CampaignConfig
from sp_bench.rows import git, plans
from sp_bench.rows.plans import PlannedTrial
from sp_bench.rows.store import RowName, require_contained


class Reporter(Protocol):
    """Makes the report of a campaign's folder. The command line brings it, since the driver draws nothing."""

    def effort(self, folder: Path) -> str:
        """Says how much of the campaign's wall time was measurement, over all its runs; empty without rows."""
        ...

    def build(self, folder: Path) -> Iterable[str]:
        """Make the report and return lines for the user: files that could not be read, and where the page is."""
        ...


@dataclass(frozen=True)
class _Plan:
    """What `plan` shows, and what a run begins with."""

    campaign: Campaign
    machine: Machine
    states: list[TrialState]
    searches: list[Searching]
    notes: list[str]

    @property
    def shown(self) -> tuple[list[Trial], list[str | None], list[str]]:
        return [state.trial for state in self.states], [state.done for state in self.states], self.notes


def planned(
    configs: Sequence[TrialConfig], settings: CampaignConfig, searches: Sequence[Search] = ()
) -> tuple[list[Trial], list[str | None], list[str]]:
    """What `run` would do: the trials, the status of each that is done, and lines of notes.

    Raises:
        ConfigError: a config that no trial can have.
    """
    return _plan(configs, settings, searches).shown


def _plan(configs: Sequence[TrialConfig], settings: CampaignConfig, searches: Sequence[Search]) -> _Plan:
    every = [*configs, *(search.config for search in searches)]
    machine = Machine(settings, hardware.gpus() if any(c.hardware.device == "cuda" for c in every) else None)
    require_devices(every, machine.gpus, settings)
    require_contained(settings.folder)
    campaign = Campaign(settings, settings.folder, *git.state())
    states = to_run.states(machine.plan(configs, settings.replicates), campaign)
    searched = searching.begin(searches, campaign, machine)
    return _Plan(campaign, machine, states, searched, notes(every, states, searched, campaign, machine))


def run(
    configs: Sequence[TrialConfig],
    settings: CampaignConfig,
    reporter: Reporter | None,
    searches: Sequence[Search] = (),
    *,
    as_json: bool = False,
    only: Collection[str] | None = None,
    words: str = "",
    on_row: Callable[[Path, Mapping[str, Any]], None] = lambda campaign, row: None,
) -> Counter[str]:
    """Leave one row of this environment for every trial, and then for every length that a search tries. Other runs of
    the campaign may share the work. Returns how many trials ended in which status, by their latest rows; `missing`:
    without a row.

    With `resume`, try again some trials that failed. With `plan_only`, show what would run, perhaps as JSON, and launch
    nothing; nothing is counted. Without a reporter, no report is made. `only`: trial_ids of the planned trials that
    this run is for, such as those of one job; None: all. `words`: the command line, for the campaign's
    file; empty: none. `on_row` is called with each row that this run commits.

    Raises:
        ConfigError: a config that no trial can have, or a results folder that cannot be written; nothing is launched.
        StorageError: the folder cannot be written any more; committed rows stay.
        SystemExit: 128 and the number of the signal that ended the run, as in shells; committed rows stay.
    """
    plan = _plan(configs, settings, searches)
    campaign, searched = plan.campaign, plan.searches
    if settings.plan_only:
        if as_json:
            print(json.dumps(plan_as_json(*plan.shown), indent=1))
        else:
            show_plan(*plan.shown)
        return Counter()
    for note in plan.notes:
        print(note)

    trials = [state.trial for state in plan.states]
    _require_planned(only or (), trials)
    write_plan = partial(_write_plan, campaign, trials, searched)
    write_plan()  # all trials, whatever `only` says, so that `status` knows what is missing
    states = [state for state in plan.states if only is None or state.trial.trial_id in only]
    attempts = [state.next for state in states if state.next]
    before = [state.done for state in states if state.done]
    found: list[str] = []  # a line for each search that ended
    try:
        with Claims(campaign.work / FOLDER) as claims:
            if words and (attempts or searches):
                for problem in record(claims, campaign.folder, words, campaign.git_sha):
                    print(f"warning: {problem}")
            killed = interrupted = False
            signals = Signals()
            with signals, Progress([each.trial for each in attempts], before) as progress, ExitStack() as held:
                try:
                    to_launch = [*(each.trial.config for each in attempts), *(each.search.config for each in searched)]
                    hosts = held.enter_context(_joined(to_launch, campaign, signals))
                    devices = _devices([*configs, *(each.search.config for each in searched)], plan.machine)
                    driver = Driver(campaign, claims, signals, progress, devices, on_row, hosts)
                    progress.later = sum(len(each.ahead) for each in searched)
                    fill(attempts, driver)
                    counted = {state.trial.trial_id for state in states}
                    for number, each in enumerate(searched, 1):
                        progress.later = sum(len(later.ahead) for later in searched[number:])
                        found.append(f"longest: {each.name}: {each.run(driver, counted, write_plan).words}")
                        write_plan()
                except Interrupted:
                    interrupted = True
                except KeyboardInterrupt:  # a second Ctrl-C: stop at once
                    killed = True
            if not killed:
                effort = reporter.effort(campaign.folder) if reporter else ""
                print(summary(campaign.folder, progress, effort, interrupted=interrupted))
                for line in found:
                    print(line)
                if interrupted and (unended := [each for each in searched if not (each.edge and each.edge.ended)]):
                    print(
                        f"{len(unended)} of {len(searched)} searches did not end; the words of this run go on with them"
                    )
            ran = {state.trial.trial_id: state.trial for state in states}
            ran |= {key: trial for each in searched for key, trial in each.probed.items()}
            latest = [state.latest for state in to_run.states([*ran.values()], campaign) if state.latest]
            _say_how_to_retry(latest, settings.max_attempts)
            if killed or interrupted:
                raise SystemExit(signals.exit_code)
            if reporter and claims.take(REPORT, lambda: False) is None:
                print(f"report: another run is making that of {campaign.folder}")
            elif reporter:
                for line in reporter.build(campaign.folder):
                    print(line)
            return Counter(row.status for row in latest) + Counter(missing=len(ran) - len(latest))
    except OSError as error:
        raise StorageError(campaign.folder, error) from error


def _devices(configs: Sequence[TrialConfig], machine: Machine) -> tuple[str, ...]:
    """The devices that trials measure on here: the processors as `cpu`, and GPUs by their UUIDs."""
    on_cpu = any(config.hardware.device == "cpu" for config in configs)
    return ("cpu",) * on_cpu + tuple(gpu.uuid for gpu in (machine.gpus.devices if machine.gpus else ()))


def _joined(
    configs: Sequence[TrialConfig], campaign: Campaign, signals: Signals
) -> AbstractContextManager[nodes.Nodes | None]:
    """While open, all hosts of this run have joined it; yields None if it needs no other host."""
    hosts = allocation.here()
    needed = hosts.by == "torchrun" or max((config.num_hosts for config in configs), default=1) > 1
    if hosts.num_hosts == 1 or not needed:  # what torchrun started waits for a driver, needed or not
        return nullcontext()
    own = hardware.environment("cuda", os.environ)
    return nodes.joined(hosts, campaign.folder, own, signals.check)


def _write_plan(campaign: Campaign, trials: Sequence[Trial], searches: Sequence[Searching]) -> None:
    """Make the campaign's folder, and write what is planned, and known of searches, beside its rows.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        campaign.work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=campaign.folder):
            pass
        planned = [PlannedTrial(t.trial_id, campaign.env_id(t), t.config.method.name) for t in trials]
        ended = {each.name: each.edge is not None and each.edge.ended for each in searches}
        brackets = {each.name: each.edge.words for each in searches if each.edge}
        probed = [key for each in searches for key in each.probed]
        plans.write(campaign.folder, planned, ended, probed, brackets)
    except OSError as error:
        raise ConfigError(
            f"cannot write results to {campaign.folder}: {error.strerror}; see results_root and campaign"
        ) from error


def _require_planned(only: Collection[str], trials: Sequence[Trial]) -> None:
    """Refuse the words of another sweep than the one that the pack is from."""
    if unknown := set(only) - {trial.trial_id for trial in trials}:
        raise ConfigError(
            f"{len(unknown)} of the {len(only)} trials of the pack are not in this plan of {len(trials)}, such as "
            f"{min(unknown)}; give the words of the submission, with the code and the files that it had"
        )


def require_devices(configs: Sequence[TrialConfig], found: hardware.Gpus | None, settings: CampaignConfig) -> None:
    """Refuse hardware that is not in this machine, since rows name the hardware by its option.

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
    if found.problem and kinds and not settings.plan_only:
        raise ConfigError(f"hardware={', '.join(kinds)} needs CUDA devices: {found.problem}")
    for model, kind in itertools.product(sorted({gpu.name for gpu in found.devices}), kinds):
        if not hardware.describes(kind, model):
            raise ConfigError(
                f"hardware={kind}, but this machine has {model}; use hardware=device, or the file of conf/hardware of "
                "that name"
            )


def _say_how_to_retry(latest: Sequence[RowName], most: int) -> None:
    """Print what to do about trials whose last attempt failed."""
    failed = [row for row in latest if row.status in RETRIED]
    spent = sum(row.attempt + 1 >= most for row in failed)
    if again := len(failed) - spent:
        print(f"{counted(again, 'trial')} failed; `sp-bench resume` with the words of this run tries again")
    if spent:
        print(f"{counted(spent, 'trial')} failed max_attempts={most} times; a larger one lets `resume` try again")
