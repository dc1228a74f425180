"""Weights & Biases: a run a row, in the project sp_bench and the group of the campaign. WANDB_MODE=offline keeps it
here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]


def log(campaign: str, place: Path, title: str, options: Mapping[str, Any], measured: Mapping[str, float]) -> None:
    settings = wandb.Settings(silent=True)
    run = wandb.init(
        project="sp_bench",
        group=campaign,
        name=title,
        config=dict(options),
        dir=place,
        reinit="create_new",
        settings=settings,
    )
    run.log(dict(measured))
    run.finish(exit_code=0 if options["status"] == "ok" else 1)
