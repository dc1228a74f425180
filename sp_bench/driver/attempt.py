"""One attempt at a trial becomes one row: who it is, what was asked for, and what came of it."""

import os
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from sp_bench import handover, hardware, methods
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import patterns
from sp_bench.driver import identity, launcher
from sp_bench.driver.claims import Claim, Claims, LostClaim
from sp_bench.driver.plan import Trial, canonical
from sp_bench.driver.progress import Progress
from sp_bench.driver.settings import CampaignConfig
from sp_bench.driver.signals import Interrupted, Signals
from sp_bench.driver.storage import StorageError, keep
from sp_bench.engines import requirements
from sp_bench.rows import store
from sp_bench.testing.kill_points import reach


@dataclass(frozen=True)
class Campaign:
    """A folder of rows being filled, and what all its rows share."""

    settings: CampaignConfig
    folder: Path
    git_sha: str | None
    git_dirty: bool | None

    @property
    def work(self) -> Path:
        """Where all lies that is not a row."""
        return self.folder / store.WORK

    def env_id(self, planned: Trial) -> str:
        return identity.env_id(planned.config)


@dataclass(frozen=True)
class Attempt:
    """A launch of a trial that has no row yet."""

    planned: Trial
    env_id: str
    number: int  # launches of this trial that have rows

    @property
    def key(self) -> str:
        return f"{self.planned.trial_id}-{self.env_id}-{self.number}"


@dataclass(frozen=True)
class Driver:
    """This process at work on a campaign, perhaps beside others."""

    campaign: Campaign
    claims: Claims
    signals: Signals
    progress: Progress
    devices: tuple[str, ...]  # what its trials measure on

    def claim(self, attempt: Attempt) -> Claim | None:
        """None: another driver has this attempt, or its row is there."""
        key = (attempt.planned.trial_id, attempt.env_id, attempt.number)
        return self.claims.take(attempt.key, lambda: store.is_committed(self.campaign.folder, *key))


class Ended(NamedTuple):
    """What an attempt's row says of it."""

    status: str
    reason: str | None
    median_step_ms: float | None


def launch(held: Sequence[tuple[Attempt, Claim]], driver: Driver) -> Generator[Ended | None, None, None]:
    """Run attempts that share their processes, commit a row for each as it ends, and yield what it says; None for a row
    that was refused, since another driver had taken the claim over.

    Ends after the first that is not ok: its processes are gone, and the rest have not run.

    Raises:
        Interrupted: a signal came; the attempt that ran is `preempted` if it says that the machine is taken away, else
            it has no row.
        StorageError: the campaign cannot be written.
    """
    watch = _Watch(driver)
    _drop_leftovers(held, driver.campaign)
    folders = [_folder(attempt, claim, driver.campaign) for attempt, claim in held]
    trials = [(attempt.planned.config, folder) for (attempt, _), folder in zip(held, folders, strict=True)]
    num_ended = 0
    with closing(launcher.run(trials, driver.campaign.settings.deadlines, watch.on_phase)) as outcomes:
        try:
            for result in outcomes:
                reach("trial_ended")
                lost = driver.signals.taken_away and result.status != "ok"  # its ranks may hear the signal first
                outcome = watch.preempted() if lost else result.columns
                num_ended += 1
                yield _commit(*held[num_ended - 1], driver, outcome)
                watch.begin()
        except Interrupted:
            if driver.signals.taken_away and num_ended < len(held):
                yield _commit(*held[num_ended], driver, watch.preempted())
            raise


class _Watch:
    """What is known of the attempt that runs, should it be taken away."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.begin()

    def begin(self) -> None:
        self._phase, self._started_at, self._start = "init", datetime.now(UTC), time.monotonic()

    def on_phase(self, phase: str) -> None:
        reach("trial_launched")
        self._phase = phase
        self._driver.progress.enter_phase(phase)
        self._driver.signals.check()

    def preempted(self) -> dict[str, Any]:
        return {
            "status": "preempted",
            "reason": f"{self._driver.signals.taken_away} in phase {self._phase}: the machine was taken away",
            "phase": self._phase,
            "started_at": self._started_at,
            "duration_s": time.monotonic() - self._start,
        }


def refuse(attempt: Attempt, driver: Driver) -> Ended | None:
    """Commit the row of a trial that cannot run; nothing is launched. None: another driver does or did so."""
    claim = driver.claim(attempt)
    if claim is None:
        return None
    columns = {
        "status": "unsupported",
        "reason": attempt.planned.unsupported_reason,
        "phase": "plan",
        "started_at": datetime.now(UTC),
    }
    return _commit(attempt, claim, driver, columns)


def _folder(attempt: Attempt, claim: Claim, campaign: Campaign) -> Path:
    """Where the attempt's ranks work: its own, since those of a driver that was given up may still write to theirs."""
    return campaign.work / "trials" / f"{attempt.key}.{claim.nonce}"


def _drop_leftovers(held: Sequence[tuple[Attempt, Claim]], campaign: Campaign) -> None:
    """Remove what interrupted launches of these attempts left, but for records, which a message may have named."""
    keys = {attempt.key for attempt, _ in held}
    parent = campaign.work / "trials"
    for name in os.listdir(parent) if parent.exists() else ():
        if name.partition(".")[0] in keys and not (parent / name / handover.RECORD).exists():
            shutil.rmtree(parent / name)


def _commit(attempt: Attempt, claim: Claim, driver: Driver, outcome: Mapping[str, Any]) -> Ended | None:
    campaign, config = driver.campaign, attempt.planned.config
    columns = dict(outcome)
    if "environment" not in columns and columns["phase"] != "plan":
        columns["environment"] = hardware.environment(config.hardware.device, launcher.environment(config))
    row = _row(attempt, campaign, columns)
    try:
        driver.claims.commit(claim, row, campaign.folder)
    except LostClaim:
        return None
    except OSError as error:
        kept = keep(row, attempt.key, _folder(attempt, claim, campaign))
        raise StorageError(campaign.folder, error, kept) from error
    finally:
        driver.claims.release(claim)
    return Ended(columns["status"], columns.get("reason"), columns.get("median_step_ms"))


def _row(attempt: Attempt, campaign: Campaign, outcome: Mapping[str, Any]) -> dict[str, Any]:
    planned = attempt.planned
    named = {
        "campaign": campaign.settings.campaign,
        "cell_id": planned.cell_id,
        "trial_id": planned.trial_id,
        "env_id": attempt.env_id,
        "core_id": identity.core_id(planned.config.hardware.device),
        "replicate": planned.replicate,
        "attempt": attempt.number,
        "order_index": planned.order_index,
        "order_seed": campaign.settings.order_seed,
        "git_sha": campaign.git_sha,
        "git_dirty": campaign.git_dirty,
    }
    return asked_for(planned.config) | dict(outcome) | named


# What asks for attention: null where the workload is the exchange alone.
_OF_ATTENTION = (
    *("layout", "variant", "placement", "dkv_dtype", "head_stride", "kernel", "model", "batch_size", "seq_len"),
    "padded_seq_len",
    *("num_layers", "num_heads", "num_kv_heads", "head_dim", "causal", "merge_dtype", "head_chunks"),
)


def asked_for(config: TrialConfig) -> dict[str, Any]:
    """The columns that say what was asked for; known without running it."""
    columns = _asked_for(config)
    return columns | dict.fromkeys(_OF_ATTENTION) if config.workload.name == "collective" else columns


def _asked_for(config: TrialConfig) -> dict[str, Any]:
    method, model, workload = methods.get(config.method.name), config.model, config.workload
    layout = method.layout(config.method, config.sp_size)
    attention = workload.name == "attention"
    return {
        "method": config.method.name,
        "implementation": method.IMPLEMENTATION,
        "primitive": methods.primitive(config.method),
        "layout": config.method.layout,
        "variant": config.method.variant,
        "placement": config.method.placement,
        "dkv_dtype": config.method.dkv_dtype
        or patterns.dkv_dtype(config.method.name, config.method.variant, layout.ring_degree),
        "merge_dtype": config.method.merge_dtype,
        "head_stride": config.method.head_stride,
        "head_chunks": config.method.head_chunks,
        "kernel": config.kernel.name,
        "workload": workload.name,
        "pass_kind": workload.pass_kind,
        "launch": workload.launch or "eager",
        "engine": config.engine.name if workload.pass_kind == "step" else None,
        "engine_implementation": requirements.implementation(config.engine) if workload.pass_kind == "step" else None,
        "optimizer_offload": config.engine.optimizer_offload,
        "model": model.name,
        "fabric": config.fabric.name,
        "hardware": config.hardware.name,
        "device_memory_gib": config.hardware.device_memory_gib,
        "batch_size": config.batch_size,
        "micro_batches": workload.num_micro_batches if workload.pass_kind == "step" else None,
        "seq_len": config.seq_len,
        "padded_seq_len": config.seq_len if attention else layout.padded(config.seq_len),
        "sp_size": config.sp_size,
        "ulysses_degree": layout.ulysses_degree,
        "ring_degree": layout.ring_degree,
        "dp_replicate_size": config.dp_replicate_size,
        "dp_shard_size": config.dp_shard_size,
        "world_size": config.world_size,
        "num_layers": None if attention else model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "causal": workload.causal,
        "dtype": config.dtype,
        "isolation": config.isolation,
        "config": canonical(config),
        "warmup_steps": workload.warmup_steps,
        "timed_steps": workload.timed_steps,
    }
