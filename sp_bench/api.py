"""The functions for programs and notebooks, which `import sp_bench` provides. Words are command-line arguments."""

from pathlib import Path
from typing import Any

import pandas as pd

from sp_bench.analysis import comparison
from sp_bench.driver import campaign, overrides, sweep
from sp_bench.driver.progress import plan_as_json
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


def compare(a: str | Path, b: str | Path) -> dict[str, Any]:
    """See `sp_bench.compare`."""
    first, second = require_campaigns([Path(a), Path(b)])
    return comparison.compare(first, second).as_json()
