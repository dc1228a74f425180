"""Submits planned trials without a row as jobs of a cluster."""

import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sp_bench import hardware
from sp_bench.cluster import batch_script, packs, slurm
from sp_bench.cluster.file import ClusterConfig
from sp_bench.cluster.packs import Pack
from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import to_run
from sp_bench.driver.progress import duration, plan_as_json
from sp_bench.driver.ranks import with_source
from sp_bench.formats import counted
from sp_bench.planning import identity, plan
from sp_bench.planning.plan import Trial
from sp_bench.planning.settings import CampaignConfig
from sp_bench.rows import store, submissions
from sp_bench.rows.store import RowName

LOGS = "jobs"  # in the campaign's _work: the output of each job
POLL_S = 5.0  # between polls of the queue


def submit(
    configs: Sequence[TrialConfig],
    settings: CampaignConfig,
    cluster: ClusterConfig,
    words: Sequence[str],
    *,
    dry_run: bool = False,
) -> list[int]:
    """Submit a job per pack of trials that `resume` would run and that are in no job yet. Returns the ids of all jobs
    with remaining trials, earlier jobs included.

    words: the arguments that each job gives to `resume`. dry_run: print the batch scripts instead.

    Raises:
        ConfigError: an impossible config, a trial that fits no job, a folder that cannot be written, or a refusal by
            Slurm. Jobs that were submitted before that stay, and the message names them.
    """
    store.require_contained(settings.folder)
    trials, notes = _planned(configs, settings, cluster)
    submitted = submissions.jobs(settings.folder)
    try:
        queued = slurm.queue() if submitted else {}
    except slurm.NoAnswer as error:
        if not dry_run:
            raise ConfigError(f"earlier jobs of this campaign may still wait or run, but {error}") from None
        print(f"warning: what earlier jobs have is not left out here, since {error}")
        queued = {}
    left, slowest_s = _without_row(
        trials, settings, cluster
    )  # read after the queue: a job that has ended since has its rows
    taken = {trial: job_id for job_id, its in submitted.items() if job_id in queued for trial in its}
    waiting = [trial for trial in left if trial.trial_id in taken]
    found = packs.packs(
        [trial for trial in left if trial.trial_id not in taken],
        settings.deadlines,
        slowest_s,
        cluster.time_limit_minutes,
    )
    new = sum(len(pack.trials) for pack in found)
    print(
        f"{counted(len(trials), 'trial')}: {len(trials) - len(left):,} done, {len(waiting):,} in earlier jobs", end=""
    )
    print(f", {new:,} in {counted(len(found), 'new job')}")
    for note in (*notes, *_without_job(left, waiting, found)):
        print(note)
    if packs.gpu_hours(found):
        print(packs.hours_text(found, slowest_s, settings.price))
    if dry_run:
        for text in _scripts(found, settings, cluster, words, submissions.new_file(settings.folder)):
            print(f"\n{text}", end="")
        return []
    earlier = sorted({taken[trial.trial_id] for trial in waiting})
    return [*earlier, *(_hand_over(found, settings, cluster, words) if found else [])]


@dataclass(frozen=True)
class Planned:
    """The result of planning a submission."""

    trials: Sequence[Trial]
    statuses: Sequence[str | None]  # status of each trial's row that counts as done
    packs: Sequence[Pack]
    slowest_s: Mapping[str, float]  # cell_id -> seconds of its slowest trial that was ok
    notes: Sequence[str]
    price: float | None = None  # of a GPU-hour

    @property
    def words(self) -> list[str]:
        """A line per pack, and the GPU-hours of all."""
        lines = [f"pack {n}: {_described(pack)}" for n, pack in enumerate(self.packs)]
        on_gpus = packs.gpu_hours(self.packs) > 0
        hours = packs.hours_text(self.packs, self.slowest_s, self.price) if on_gpus else "no GPU-hours"
        return [*lines, *self.notes, f"{counted(len(self.packs), 'pack')}, {hours}"]

    def as_json(self) -> dict[str, Any]:
        described = [{**_as_json(pack), "estimate_s": pack.estimate_s} for pack in self.packs]
        return plan_as_json(self.trials, self.statuses, []) | {
            "packs": described,
            "gpu_hours": packs.gpu_hours(self.packs),
            "likely_gpu_hours": packs.likely_gpu_hours(self.packs, self.slowest_s),
        }


def planned(configs: Sequence[TrialConfig], settings: CampaignConfig, cluster: ClusterConfig) -> Planned:
    """The packs that `submit` would make if no job waited or ran. Calls no program of Slurm.

    Raises:
        ConfigError: an impossible config, or a trial that fits no job.
    """
    store.require_contained(settings.folder)
    trials, notes = _planned(configs, settings, cluster)
    left, slowest_s = _without_row(trials, settings, cluster)
    keys = {trial.trial_id for trial in left}
    rows = _rows([trial for trial in trials if trial.trial_id not in keys], settings.folder, cluster)
    latest = {key: max(found, key=lambda row: row.attempt).status for key, found in rows.items()}
    found = packs.packs(left, settings.deadlines, slowest_s, cluster.time_limit_minutes)
    notes += _without_job(left, (), found)
    return Planned(trials, [latest.get(trial.trial_id) for trial in trials], found, slowest_s, notes, settings.price)


def wait(
    job_ids: Collection[int], configs: Sequence[TrialConfig], settings: CampaignConfig, cluster: ClusterConfig
) -> None:
    """Return once none of the jobs waits or runs. Prints a line when the number of jobs or of rows has changed.

    Raises:
        ConfigError: squeue does not answer.
    """
    trial_ids = {trial.trial_id for trial in _planned(configs, settings, cluster)[0]}
    left, failures, before = set(job_ids), 0, ""
    while left:
        try:
            queued = slurm.queue()
            left &= queued.keys()
            running = sum(queued[each].state == "RUNNING" for each in left)
            have_rows = {row.trial_id for row in store.committed(settings.folder)} & trial_ids
            line = f"{counted(running, 'job')} running, {len(left) - running} waiting; {len(have_rows)} of "
            line += f"{counted(len(trial_ids), 'trial')} have rows"
            if line != before:
                print(line, flush=True)
            failures, before = 0, line
        except slurm.NoAnswer as error:
            failures += 1  # a restarting controller does not end its jobs
            if failures == 10:
                raise ConfigError(f"cannot wait for the jobs, which go on: {error}") from None
        if left:
            time.sleep(POLL_S)


def statuses(configs: Sequence[TrialConfig], settings: CampaignConfig, cluster: ClusterConfig) -> Counter[str]:
    """Status -> number of trials, by their latest rows; `missing` counts trials without a row."""
    trials, _ = _planned(configs, settings, cluster)
    rows = _rows(trials, settings.folder, cluster)
    latest = [max(rows[trial.trial_id], key=lambda row: row.attempt, default=None) for trial in trials]
    return Counter(row.status if row else "missing" for row in latest)


def _planned(
    configs: Sequence[TrialConfig], settings: CampaignConfig, cluster: ClusterConfig
) -> tuple[list[Trial], list[str]]:
    """(the trials as a job of the cluster plans them, lines about what that rests on). A job has as many nodes as its
    trials need. Where its packages are unknown here, it is assumed to have those that the trials need."""

    def trials() -> list[Trial]:
        gpus = cluster.gpus_per_node
        return plan.plan(configs, settings.replicates, settings.order_seed, num_gpus=gpus, num_hosts=None)

    here = trials()
    if cluster.same_packages:
        return here, []
    with hardware.as_if_installed():
        there = trials()
    lacking = [
        before.unsupported_reason
        for before, after in zip(here, there, strict=True)
        if before.unsupported_reason and not after.unsupported_reason
    ]
    notes = []
    if lacking:
        notes.append(
            f"assumed: the nodes of {cluster.name} have what {counted(len(lacking), 'trial')} cannot find on this "
            f"machine ({'; '.join(sorted(set(lacking)))}). A trial whose package the nodes lack gets an unsupported row"
        )
    num_nodes = max(trial.config.num_hosts for trial in there)
    if cluster.container and num_nodes > 1:
        notes.append(
            f"warning: num_nodes={num_nodes} with `container`: the run calls srun to reach the other nodes, so the "
            "container must have Slurm's srun and its files (slurm.conf, munge)"
        )
    return there, notes


def _without_job(left: Sequence[Trial], waiting: Sequence[Trial], found: Sequence[Pack]) -> list[str]:
    """A line about trials that no node of the cluster can run and that are in no job."""
    packed = {trial.trial_id for trial in waiting}.union(trial.trial_id for pack in found for trial in pack.trials)
    reasons = [trial.unsupported_reason for trial in left if trial.trial_id not in packed]
    if not reasons:
        return []
    return [f"{counted(len(reasons), 'trial')} in no job, since no node can run them: {reasons[0]}"]


def _without_row(
    trials: Sequence[Trial], settings: CampaignConfig, cluster: ClusterConfig
) -> tuple[list[Trial], dict[str, float]]:
    """(trials that `resume` would run, cell_id -> seconds of the slowest ok trial). Where the nodes' packages are
    unknown here, an `unsupported` row ends its trial, until `rm` moves it away."""
    retrying = replace(settings, resume=True)
    rows = _rows(trials, settings.folder, cluster)
    refused = to_run.refused_by_ranks((row for found in rows.values() for row in found), settings.folder)
    left = []
    for trial in trials:
        found = rows[trial.trial_id]
        if not cluster.same_packages and any(row.status == "unsupported" for row in found):
            continue  # the nodes said that they cannot run it
        if all(to_run.next_attempt(row, trial, retrying, refused) is not None for row in found):
            left.append(trial)
    cells = {trial.cell_id for trial in left}
    slowest_s: dict[str, float] = {}
    for row in _columns(settings.folder, "cell_id", "status", "duration_s"):
        if row["status"] == "ok" and row["cell_id"] in cells and row["duration_s"]:
            slowest_s[row["cell_id"]] = max(slowest_s.get(row["cell_id"], 0.0), row["duration_s"])
    return left, slowest_s


def _rows(trials: Sequence[Trial], folder: Path, cluster: ClusterConfig) -> Mapping[str, list[RowName]]:
    """trial_id -> its latest row in each environment that a job of the cluster may have.

    The submitting machine may have another processor and no GPU. So all devices that rows of the campaign name count,
    and this machine's. The packages of a container are unknown here, so with one, rows of any environment count.
    """
    found: dict[str, list[RowName]] = {trial.trial_id: [] for trial in trials}
    latest = store.latest(store.committed(folder)) if folder.is_dir() else {}
    models = _device_models(folder) if latest else {}
    by_trial: dict[str, list[RowName]] = {}
    for row in latest.values():
        by_trial.setdefault(row.trial_id, []).append(row)
    for trial in trials:
        rows = by_trial.get(trial.trial_id, [])
        if rows and cluster.same_packages:
            known = {identity.env_id(trial.config, model) for model in models[trial.config.hardware.device]}
            rows = [row for row in rows if row.env_id in known]
        found[trial.trial_id] = rows
    return found


def _device_models(folder: Path) -> dict[str, set[str]]:
    """cpu and cuda -> names of the devices in the campaign's rows and in this machine, as `hardware.device_model` gives
    them."""
    models = {device: {hardware.device_model(device)} for device in ("cpu", "cuda")}
    for row in _columns(folder, "environment"):
        measured_on = row["environment"] or {}
        if names := measured_on.get("device_names"):
            models["cuda"].add(", ".join(sorted(set(names))))
        if measured_on.get("cpu"):
            models["cpu"].add(measured_on["cpu"])
    return models


def _columns(folder: Path, *names: str) -> list[dict[str, Any]]:
    return store.read(folder, names)[0].to_pylist() if folder.is_dir() else []


def _scripts(
    found: Sequence[Pack], settings: CampaignConfig, cluster: ClusterConfig, words: Sequence[str], file: Path
) -> list[str]:
    """The batch script of each pack. Jobs start in the current folder, since arguments may name files relative to
    it."""
    starter = cluster.sp_bench or _this_sp_bench()
    log = (settings.folder / store.WORK / LOGS / "%j.txt").absolute()
    name, folder = f"sp_bench-{settings.campaign}", Path.cwd()
    return [
        batch_script.script(
            pack, cluster, name, log, folder, [*starter, "resume", *words, "--no-report", "--pack", str(file), str(n)]
        )
        for n, pack in enumerate(found)
    ]


def _this_sp_bench() -> list[str]:
    """The command that starts this sp_bench. -P: modules in the job's folder do not shadow it."""
    command = [sys.executable, "-P", "-m", "sp_bench"]
    path = with_source({}).get("PYTHONPATH")
    return ["env", f"PYTHONPATH={path}", *command] if path else command


def _hand_over(
    found: Sequence[Pack], settings: CampaignConfig, cluster: ClusterConfig, words: Sequence[str]
) -> list[int]:
    file = submissions.new_file(settings.folder)
    scripts = _scripts(found, settings, cluster, words, file)
    command = {"cluster": cluster.name, "words": list(words)}
    described = [_as_json(pack) for pack in found]
    job_ids: list[int] = []
    try:
        for folder in (file.parent, settings.folder / store.WORK / LOGS):
            folder.mkdir(parents=True, exist_ok=True)
        submissions.write(file, command, described, job_ids)
        for pack, text in zip(found, scripts, strict=True):
            job_ids.append(slurm.submit(text))
            submissions.write(file, command, described, job_ids)  # at once: a submission may be killed
            print(f"job {job_ids[-1]}: {_described(pack)}")
    except OSError as error:
        raise ConfigError(
            f"cannot write the submission to {file.parent}: {error.strerror}; jobs submitted: {_named(job_ids)}"
        ) from error
    except slurm.NoAnswer as error:
        if not job_ids:
            file.unlink()
        raise ConfigError(
            f"{len(job_ids)} of {counted(len(found), 'job')} submitted ({_named(job_ids)}): {error}. The same command "
            "submits the rest"
        ) from None
    print(f"sp-bench status {settings.folder} shows the queue and the rows")
    return job_ids


def _named(job_ids: Sequence[int]) -> str:
    return ", ".join(map(str, job_ids)) or "none"


def _as_json(pack: Pack) -> dict[str, Any]:
    return {
        "num_nodes": pack.num_nodes,
        "gpus_per_node": pack.gpus_per_node,
        "replicate": pack.replicate,
        "minutes": pack.minutes,
        "trials": [trial.trial_id for trial in pack.trials],
    }


def _described(pack: Pack) -> str:
    nodes = counted(pack.num_nodes, "node") if pack.num_nodes > 1 else "one node"
    each = "of each of " if pack.num_nodes > 1 else "of "
    where = f"{counted(pack.gpus_per_node, 'GPU')} {each}{nodes}" if pack.gpus_per_node else nodes
    words = (
        f"{counted(len(pack.trials), 'trial')} of replicate {pack.replicate} on {where}, {duration(60 * pack.minutes)}"
    )
    if pack.estimate_s > 60 * pack.minutes:
        words += f"; they may take {duration(pack.estimate_s)}, and what is left then needs another submission"
    return words
