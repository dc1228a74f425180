"""Where the values of a world of one rank are proven: by a row of real ranks.

One rank's values are wrong by design, so nothing is compared there. Its row names an ok row with equal method, options,
kernel and dtype, on any number of ranks, whose ranks proved output and gradients before they were timed. Without such a
row the trial is `unsupported`.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sp_bench.config.options import BY_PATH, OPTIONS, as_overridden
from sp_bench.config.parsing import ConfigError, parse
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import TRAINING
from sp_bench.rows import store

_GROUPS = ("method", "kernel")
_OF_STEP = (
    *("activation_checkpointing", "checkpoint_offload", "model_code", "linear_dtype"),
    *("loss_tile_tokens", "mlp_tile_tokens"),
)
_PROVEN = ("workload.name", "workload.pass_kind", "workload.causal", "workload.packing", "workload.sinks", "dtype")
_OF_HEADS = ("model.v_head_dim", "model.kv_lora_rank")  # that there are such, of any size
PROOF_LEN, MOST_WINDOW = 4096, 2048  # tokens of the proof that is suggested, and the longest window there
_COLUMNS = ("status", "evidence", "world_size", "trial_id", "env_id", "config")


def _options(config: TrialConfig) -> dict[str, Any]:
    """Path -> value of the options that a proof shares with what it proves. A window of any length proves others."""
    trains = config.workload.name in TRAINING
    paths = {*_PROVEN, *(f"workload.{name}" for name in _OF_STEP if trains)}
    groups = (*_GROUPS, "engine") if trains else _GROUPS
    shared = {
        option.path: option
        for option in OPTIONS
        if option.path in paths or (option.group in groups and option.unit != "ranks")  # on any number of ranks
    }
    values = {
        path: option.none_means if (value := option.value(config)) is None else value for path, option in shared.items()
    }
    uneven = config.model.v_head_dim not in (None, config.model.head_dim)
    values |= dict(zip(_OF_HEADS, (uneven, config.model.kv_lora_rank is not None), strict=True))
    if trains:
        shapes = {kind: config.attention_shape(config.seq_len, kind) for kind in config.kinds}
        # a window of the whole sequence hides nothing
        of_kinds = {"full" if kind == "window" and not shape.window else kind for kind, shape in shapes.items()}
        kinds = "+".join(sorted(of_kinds))
        return values | {"model.layers": None if kinds == "full" else kinds, "model.sinks": config.model.sinks}
    kind = {"model.attention": config.model.attention}
    return values | {"workload.window": config.workload.window is not None} | kind


def find(config: TrialConfig, folder: Path) -> str | None:
    """campaign/trial_id-env_id of the proof among the campaigns in `folder`, the last by name; None: there is none."""
    wanted = _options(config)
    campaigns = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    for campaign, row in reversed(_rows(tuple((path, path.stat().st_mtime_ns) for path in campaigns))):
        text = row["config"]
        if f'"name":"{config.method.name}"' not in text or f'"name":"{config.kernel.name}"' not in text:
            continue  # parsing takes longer
        if (known := _parsed(text)) and not known.workload.fit and _options(known) == wanted:
            return f"{campaign}/{row['trial_id']}-{row['env_id']}"
    return None


def missing_reason(config: TrialConfig, folder: Path) -> str | None:
    """Why nothing proves what the rank of a world of one computes, with the command that makes a proof; None: it is
    proven, or all ranks are there and prove it themselves."""
    if config.world == "ranks" or find(config, folder):
        return None
    shared = " hardware.ranks_per_gpu=2 fabric=socket" if config.hardware.device == "cuda" else ""
    options = " ".join(f"{as_overridden(path)}={_word(value)}" for path, value in _chosen(config).items())
    return (
        f"world=one_rank: no ok row of real ranks in {folder} proves {config.method.name} with kernel="
        f"{config.kernel.name} and these options; run one first: sp-bench run {options} sp_size=2 seq_len={PROOF_LEN} "
        f"model={config.model.name} hardware={config.hardware.name}{shared} results_root={folder}"
    )


def _chosen(config: TrialConfig) -> Mapping[str, Any]:
    """Options of a proof as a command line says them: names first, then what is not None, and what is not as in rows
    of before the option. The model is named already, so of its own options only layers of several kinds are there."""
    shared = [BY_PATH[path] for path in _options(config) if not path.startswith("model.")]
    known = {
        option.path: value
        for option in shared
        if (value := option.value(config)) is not None and not (option.omitted and value == option.old_rows)
    }
    names = {path.removesuffix(".name"): value for path, value in known.items() if path.endswith(".name")}
    rest = {path: value for path, value in known.items() if not path.endswith(".name")}
    if layers := _options(config).get("model.layers"):
        rest |= {"model.layers": layers, "model.sinks": config.model.sinks}
        rest |= {"model.window": config.model.window} if "window" in layers else {}
    for window in ("model.window", "workload.window"):
        if window in rest:
            rest[window] = min(rest[window], MOST_WINDOW)
    return names | rest


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def _rows(campaigns: tuple[tuple[Path, int], ...]) -> list[tuple[str, Mapping[str, Any]]]:
    """Campaign and row of what may be a proof, one a config. campaigns: folders, and when they last changed."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for campaign, _ in campaigns:
        for row in store.read(campaign, _COLUMNS)[0].to_pylist():
            if row["status"] == "ok" and row["evidence"] != "one_rank" and (row["world_size"] or 1) > 1:
                found[row["config"]] = (campaign.name, row)
    return list(found.values())


@cache
def _parsed(text: str) -> TrialConfig | None:
    try:
        return parse(TrialConfig, json.loads(text))
    except ConfigError:  # an old row of what no trial may be today proves nothing of today's
        return None
