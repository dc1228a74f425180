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
from sp_bench.config.documents import MULTIPLE, from_text
from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import allocation, derived, nodes, plan
from sp_bench.driver.attempt import Attempt, Campaign, Driver, StorageError
from sp_bench.driver.claims import FOLDER, REPORT, Claims
from sp_bench.driver.device_time import minutes, trial_s
from sp_bench.driver.filling import RETRIED, fill, latest_rows, next_attempt
from sp_bench.driver.machine import Machine
from sp_bench.driver.plan import Trial
from sp_bench.driver.progress import Progress, layout, number_of, plan_as_json, search_names, show_plan, summary
from sp_bench.driver.search import Search
from sp_bench.driver.searching import Begun, Searching, begin
from sp_bench.driver.settings import CampaignConfig
from sp_bench.driver.signals import Interrupted, Signals
from sp_bench.rows import plans, store
from sp_bench.rows.plans import PlannedTrial
from sp_bench.rows.store import RowName, require_contained


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
    machine: Machine
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
    machine = Machine(settings, hardware.gpus() if "cuda" in kinds else None)
    require_devices(every, machine.gpus, settings)
    require_contained(settings.folder)
    campaign = Campaign(settings, settings.folder, *hardware.git_state())
    trials = machine.plan(configs, settings.replicates)
    rows = latest_rows(trials, campaign)
    numbers = [next_attempt(row, trial, settings) for row, trial in zip(rows, trials, strict=True)]
    num_cores = len(os.sched_getaffinity(0))
    notes = [f"warning: {words}" for words in plan.warnings(trials, num_cores, machine.smallest_gpu_bytes)]
    notes += [f"warning: {words}" for words in (*plan.slow_updates(every), *plan.inherited(every, os.environ))]
    notes += _measured_elsewhere([trial for trial, row in zip(trials, rows, strict=True) if row is None], campaign)
    notes += _unknown_rates(trials, machine.gpus)
    notes += _of_packs(trials)
    names = search_names([search.config for search in searches])
    begun = [begin(search, campaign, machine) for search in searches]
    for name, each in zip(names, begun, strict=True):
        notes.append(f"search: {name}: {each.words}")
        notes += [f"warning: search: {name}: {words}" for words in each.refusals]
    notes += _device_time(trials, numbers, begun, machine)
    return _State(campaign, machine, trials, rows, numbers, notes)


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
    trials, rows, numbers, campaign, machine = state.trials, state.rows, state.numbers, state.campaign, state.machine
    if settings.plan_only:
        if as_json:
            print(json.dumps(plan_as_json(*state.shown), indent=1))
        else:
            show_plan(*state.shown)
        return Counter()
    for note in state.notes:
        print(note)
    _require_planned(only or (), trials)

    searching = Searching(searches, campaign, machine)
    write_plan = partial(_write_plan, campaign, list(trials), searching)
    write_plan()
    if only is not None:  # the plan beside the rows is of all, so that `status` and reports know what is missing
        kept = [n for n, trial in enumerate(trials) if trial.trial_id in only]
        trials, rows, numbers = [trials[n] for n in kept], [rows[n] for n in kept], [numbers[n] for n in kept]
    attempts = [Attempt(t, campaign.env_id(t), n) for t, n in zip(trials, numbers, strict=True) if n is not None]
    before = [row.status for row, number in zip(rows, numbers, strict=True) if row and number is None]
    on_cpu = any(c.hardware.device == "cpu" for c in [*configs, *(search.config for search in searches)])
    devices = ("cpu",) * on_cpu + tuple(gpu.uuid for gpu in (machine.gpus.devices if machine.gpus else ()))
    try:
        with Claims(campaign.work / FOLDER) as claims:
            killed = interrupted = False
            planned = {trial.trial_id: trial for trial in trials}
            signals = Signals()
            with signals, Progress([each.planned for each in attempts], before) as progress, ExitStack() as held:
                try:
                    asked = [*(each.planned.config for each in attempts), *(search.config for search in searches)]
                    hosts = held.enter_context(_joined(asked, campaign, signals))
                    driver = Driver(campaign, claims, signals, progress, devices, hear, hosts)
                    left = searching.left()
                    progress.later = sum(left)
                    fill(attempts, driver)
                    searching.run(driver, left, planned.keys(), write_plan)
                except Interrupted:
                    interrupted = True
                except KeyboardInterrupt:  # a second Ctrl-C: stop at once
                    killed = True
            if not killed:
                effort = reporter.effort(campaign.folder) if reporter else ""
                print(summary(campaign.folder, progress, effort, interrupted=interrupted))
                for line in searching.said:
                    print(line)
                if interrupted and (unended := searching.unended):
                    print(f"{unended} of {len(searches)} searches did not end; the words of this run go on with them")
            latest = [row for row in latest_rows([*(planned | searching.probed).values()], campaign) if row]
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
    needed = hosts.by == "torchrun" or max((config.num_hosts for config in asked), default=1) > 1
    if hosts.num_hosts == 1 or not needed:  # what torchrun started waits for a driver, needed or not
        return nullcontext()
    own = hardware.environment("cuda", os.environ)
    return nodes.joined(hosts, campaign.folder, own, signals.check)


def _write_plan(campaign: Campaign, trials: Sequence[Trial], searching: Searching) -> None:
    """Make the campaign's folder, and write what is planned, and known of searches, beside its rows.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        campaign.work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=campaign.folder):
            pass
        planned = [PlannedTrial(t.trial_id, campaign.env_id(t), t.config.method.name) for t in trials]
        ended = {name: edge is not None and edge.ended for name, edge in searching.edges.items()}
        brackets = {name: edge.words for name, edge in searching.edges.items() if edge}
        plans.write(campaign.folder, planned, ended, searching.probed, brackets)
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


def _device_time(
    trials: Sequence[Trial], numbers: Sequence[int | None], begun: Sequence[Begun], machine: Machine
) -> list[str]:
    """How long what is left would keep GPUs busy. Without GPUs here, as on a login node, what any machine could run
    counts."""
    left = [trial for trial, number in zip(trials, numbers, strict=True) if number is not None]
    cells = {trial.cell_id: trial.config for trial in left}  # of which replicates are many
    refused = {cell_id: machine.refusal(config) for cell_id, config in cells.items()}
    asked = [trial.config for trial in left if refused[trial.cell_id] is None]
    listed = [seconds for config in asked if (seconds := trial_s(config, machine.device_name)) is not None]
    searched = [seconds for each in begun if (seconds := each.left_s)]
    if not listed and not searched:
        return []
    counts = [number_of(len(listed))] if listed else []
    counts += [f"{len(searched)} search{'es' * (len(searched) != 1)}"] if searched else []
    return [f"devices: {' and '.join(counts)} on GPUs, about {minutes(sum(listed) + sum(searched))}"]


def _say_how_to_retry(latest: Sequence[RowName], most: int) -> None:
    """Print what to do about trials whose last attempt failed."""
    failed = [row for row in latest if row.status in RETRIED]
    spent = sum(row.attempt + 1 >= most for row in failed)
    if again := len(failed) - spent:
        print(f"{number_of(again)} failed; `sp-bench resume` with the words of this run tries again")
    if spent:
        print(f"{number_of(spent)} failed max_attempts={most} times; a larger one lets `resume` try again")
