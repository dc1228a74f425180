"""TensorBoard: a run a row, with its options as hyperparameters, in the campaign's _work/tensorboard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]


def log(campaign: str, place: Path, title: str, options: Mapping[str, Any], measured: Mapping[str, float]) -> None:
    shown = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in options.items()}
    with SummaryWriter(str(place)) as writer:
        writer.add_hparams(shown, dict(measured), name=title)
