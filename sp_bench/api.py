"""The functions for programs and notebooks, which `import sp_bench` provides. Words are command-line arguments."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sp_bench.analysis import comparison, words
from sp_bench.analysis.cells import cells, of_equal_steps
from sp_bench.analysis.identifiers import RECOMPUTED
from sp_bench.analysis.selection import select
from sp_bench.analysis.settings import Difference, settings
from sp_bench.driver import campaign
from sp_bench.driver.progress import plan_as_json
from sp_bench.planning import overrides, sweep
from sp_bench.rows import campaign_file, plans
from sp_bench.rows.frame import load
from sp_bench.rows.store import require_campaigns


def plan(*words: str) -> dict[str, Any]:
    """See `sp_bench.plan`."""
    asked = sweep.read(overrides.read_arguments([*words, "plan_only=true"]))
    return plan_as_json(*campaign.planned(asked.configs, asked.settings, asked.searches))


def run(*words: str) -> pd.DataFrame:
    """See `sp_bench.run`."""
    asked = sweep.read(overrides.read_arguments(words))
    command = campaign_file.command("run", words)
    campaign.run(asked.configs, asked.settings, None, asked.searches, words=command)
    trials, _, _ = campaign.planned(asked.configs, asked.settings)
    found = {trial.trial_id for trial in trials}
    if asked.searches:
        found |= plans.read(asked.settings.folder)[-1].probes
    rows = load([asked.settings.folder])
    return pd.DataFrame(rows[rows["trial_id"].isin([*found])]).reset_index(drop=True)


RATIO_COLUMNS = (
    *("evidence", "workload", "pass_kind", "engine", "model", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("dtype", "causal", "window", "hardware", "fabric", "kernel", "launch", "packing", "document_len", "sp_size"),
    *("seq_len", "linear_dtype", "model_code", "checkpoint_offload", "optimizer_offload"),
)


def ratios(folders: Sequence[str | Path], slow: str, fast: str) -> pd.DataFrame:
    """See `sp_bench.ratios`."""
    if not folders:
        raise ValueError("ratios: no folders; name campaigns, as results/smoke")
    measured = cells(of_equal_steps(select([Path(folder) for folder in folders]).rows))
    known = {str(cell.asked["method"]) for cell in measured}
    for name in {slow, fast} - known:
        raise ValueError(f"ratios: {name} is not in these rows; they have {', '.join(sorted(known))}")
    lines = []
    for place in (place for setting in settings(measured) for place in setting.contests):
        over, under = (next((c for c in place.best if c.asked["method"] == name), None) for name in (slow, fast))
        if over is None or under is None or (found := Difference(under, over, place.smallest)).ratio is None:
            continue
        interval = found.paired.interval if found.paired else None
        lines.append(
            {name: place.first.asked[name] for name in RATIO_COLUMNS}
            | {"link": place.first.link or None, "num_nodes": place.first.options["num_nodes"]}
            | {"pack": place.first.name.pack}
            | {"recomputed": place.first.options[RECOMPUTED]}
            | {name: place.first.options[f"workload.{name}"] for name in ("loss_tile_tokens", "mlp_tile_tokens")}
            | {"slow": words.method(over), "fast": words.method(under), "ratio": found.ratio}
            | {"low": interval and interval.low, "high": interval and interval.high, "pairs": len(found.keys)}
            | {"verdict": found.outcome, "grade": found.grade.mark, "campaign": found.keys[0].campaign}
        )
    return pd.DataFrame(lines)


def compare(a: str | Path, b: str | Path) -> dict[str, Any]:
    """See `sp_bench.compare`."""
    first, second = require_campaigns([Path(a), Path(b)])
    return comparison.compare(first, second).as_json()
