"""One attempt at a trial becomes one row: who it is, what was asked for, and what came of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sp_bench import hardware, methods, results, trial
from sp_bench.config import CampaignConfig, TrialConfig
from sp_bench.plan import Trial, canonical


@dataclass(frozen=True)
class Campaign:
    """A folder of rows being filled, and what all its rows share."""

    settings: CampaignConfig
    folder: Path
    env_ids: Mapping[str, str]  # by kind of device: cpu, cuda
    git_sha: str | None
    git_dirty: bool | None

    @property
    def work(self) -> Path:
        """Where all lies that is not a row."""
        return self.folder / results.WORK

    def env_id(self, planned: Trial) -> str:
        return self.env_ids[planned.config.hardware.device]


# `run` never repeats a committed trial, so each attempt it makes is the first.
ATTEMPT = 0


def launch(group: Sequence[Trial], campaign: Campaign, on_phase: trial.OnPhase) -> Iterator[str]:
    """Run trials that share their processes, commit a row for each as it ends, and yield its status.

    Ends after the first that is not ok: its processes are gone, and the rest have not run.
    """
    trials = [
        (planned.config, campaign.work / "trials" / f"{planned.trial_id}-{campaign.env_id(planned)}-{ATTEMPT}")
        for planned in group
    ]
    outcomes = trial.run(trials, campaign.settings.deadlines, on_phase)
    for planned, result in zip(group, outcomes, strict=False):
        columns = dict(result.columns)
        if "environment" not in columns:
            variables = trial.environment(planned.config)
            columns["environment"] = hardware.environment(planned.config.hardware.device, variables)
        results.write(_row(planned, campaign, columns), campaign.folder)
        yield result.status


def refuse(planned: Trial, campaign: Campaign) -> str:
    """Commit the row of a trial that cannot run; nothing is launched."""
    columns = {
        "status": "unsupported",
        "reason": planned.unsupported_reason,
        "phase": "plan",
        "started_at": datetime.now(UTC),
    }
    results.write(_row(planned, campaign, columns), campaign.folder)
    return "unsupported"


def _row(planned: Trial, campaign: Campaign, outcome: Mapping[str, Any]) -> dict[str, Any]:
    identity = {
        "campaign": campaign.settings.campaign,
        "cell_id": planned.cell_id,
        "trial_id": planned.trial_id,
        "env_id": campaign.env_id(planned),
        "replicate": planned.replicate,
        "attempt": ATTEMPT,
        "order_index": planned.order_index,
        "order_seed": campaign.settings.order_seed,
        "git_sha": campaign.git_sha,
        "git_dirty": campaign.git_dirty,
    }
    return asked_for(planned.config) | dict(outcome) | identity


# What asks for attention: null where the workload is the exchange alone.
_OF_ATTENTION = (
    *("layout", "placement", "dkv_dtype", "head_stride", "kernel", "model", "batch_size", "seq_len", "padded_seq_len"),
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
        "placement": config.method.placement,
        "dkv_dtype": config.method.dkv_dtype,
        "merge_dtype": config.method.merge_dtype,
        "head_stride": config.method.head_stride,
        "head_chunks": config.method.head_chunks,
        "kernel": config.kernel.name,
        "workload": workload.name,
        "pass_kind": workload.pass_kind,
        "model": model.name,
        "fabric": config.fabric.name,
        "hardware": config.hardware.name,
        "device_memory_gib": config.hardware.device_memory_gib,
        "batch_size": config.batch_size,
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
