"""What a trial is called in a terminal, and what tells those apart that would be called the same."""

import json
from collections.abc import Iterable, Mapping

from sp_bench.config.options import OPTIONS, canonical
from sp_bench.config.parsing import dotted
from sp_bench.config.trial import EngineConfig, TrialConfig
from sp_bench.driver.plan import Trial


def label(trial: Trial, options: Mapping[str, str]) -> str:
    """One trial in a few words. `options`: as `distinguishing` gives them, for the trials that it stands among."""
    more = (options.get(trial.cell_id, ""), f"replicate {trial.replicate}" if trial.replicate else "")
    return " ".join(filter(None, (_cell_label(trial.config), *more)))


def layout(config: TrialConfig) -> str:
    """The layout, and for a method on two axes which of them is the inner one."""
    method = config.method
    return f"{method.layout}/{method.placement}" if method.placement else method.layout


def workload(config: TrialConfig) -> str:
    """The workload, its pass and, unless it is the default one, the engine: train_step/step hf_deepspeed."""
    name = f"{config.workload.name}/{config.workload.pass_kind}"
    return name if config.engine.name == EngineConfig().name else f"{name} {config.engine.name}"


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
        unwritten = {option.path: option.old_rows for option in OPTIONS if option.old_rows is not None}
        leaves = {cell: unwritten | dotted(json.loads(canonical(cells[cell]))) for cell in group}
        names = sorted({name for each in leaves.values() for name in each})
        differ = [name for name in names if len({str(each.get(name)) for each in leaves.values()}) > 1]
        for cell, each in leaves.items():
            said = {name.replace("method.own.", "method."): _text(each.get(name)) for name in differ}
            found[cell] = " ".join(f"{name}={value}" for name, value in said.items())
    return found


def _text(value: object) -> str:
    return "null" if value is None else str(value)


def _cell_label(config: TrialConfig) -> str:
    if config.workload.name == "collective":
        return f"{config.method.name} collective {config.fabric.name} sp_size={config.sp_size} {config.dtype}"
    dp = config.dp_replicate_size * config.dp_shard_size
    words = [
        config.method.name,
        layout(config),
        config.kernel.name,
        workload(config),
        config.model.name,
        f"seq_len={config.seq_len}",
        f"sp_size={config.sp_size}",
        config.fabric.name,
        *([f"dp={dp}"] if dp > 1 else []),
        config.dtype,
    ]
    return " ".join(words)
