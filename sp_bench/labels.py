"""What a trial is called in a terminal, and what tells those apart that would be called the same."""

import json
from collections.abc import Iterable, Iterator, Mapping

from sp_bench.config import EngineConfig, TrialConfig
from sp_bench.plan import Trial, canonical


def label(trial: Trial, options: Mapping[str, str]) -> str:
    """One trial in a few words. `options`: as `distinguishing` gives them, for the trials that it stands among."""
    more = (options.get(trial.cell_id, ""), f"replicate {trial.replicate}" if trial.replicate else "")
    return " ".join(filter(None, (_cell_label(trial.config), *more)))


def layout(config: TrialConfig) -> str:
    """The layout, and for a method on two axes which of them is the inner one."""
    method = config.method
    return f"{method.layout}/{method.placement}" if method.placement else method.layout


def engine(config: TrialConfig) -> str:
    """What trains, unless it is the only one that all workloads know, with a space before it."""
    return "" if config.engine.name == EngineConfig().name else f" {config.engine.name}"


def distinguishing(trials: Iterable[Trial]) -> Mapping[str, str]:
    """cell_id -> the options, as they are overridden, that tell a cell from others with the same label."""
    cells = {trial.cell_id: trial.config for trial in trials}
    alike: dict[str, list[str]] = {}
    for cell, config in cells.items():
        alike.setdefault(_cell_label(config), []).append(cell)
    found: dict[str, str] = {}
    for group in alike.values():
        if len(group) == 1:
            continue
        leaves = {cell: dict(_leaves(json.loads(canonical(cells[cell])))) for cell in group}
        names = sorted({name for each in leaves.values() for name in each})
        differ = [name for name in names if len({str(each.get(name)) for each in leaves.values()}) > 1]
        for cell, each in leaves.items():
            found[cell] = " ".join(f"{name}={_text(each.get(name))}" for name in differ)
    return found


def _text(value: object) -> str:
    return "null" if value is None else str(value)


def _leaves(value: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def _cell_label(config: TrialConfig) -> str:
    if config.workload.name == "collective":
        return f"{config.method.name} collective {config.fabric.name} sp_size={config.sp_size} {config.dtype}"
    dp = config.dp_replicate_size * config.dp_shard_size
    words = [
        config.method.name,
        layout(config),
        config.kernel.name,
        f"{config.workload.name}/{config.workload.pass_kind}{engine(config)}",
        config.model.name,
        f"seq_len={config.seq_len}",
        f"sp_size={config.sp_size}",
        config.fabric.name,
        *([f"dp={dp}"] if dp > 1 else []),
        config.dtype,
    ]
    return " ".join(words)
