"""Loggers of experiments, which get each row as it is committed. The rows are what counts: after a logger fails, the
sweep says so and goes on without it.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sp_bench.config.parsing import ConfigError, shown
from sp_bench.rows import flat, store

NAMES = ("wandb", "mlflow", "tensorboard")
Row = Mapping[str, Any]


class Logger:
    """Logs rows of one campaign to `name`."""

    def __init__(self, name: str) -> None:
        """
        Raises:
            ConfigError: an unknown name, or its package is missing.
        """
        if name not in NAMES:
            raise ConfigError(f"--log-to {shown(name)}: unknown; use one of {', '.join(NAMES)}")
        self._module = _module(name)
        self._name, self._failed = name, False

    def __call__(self, campaign: Path, row: Row) -> None:
        if self._failed:
            return
        title = f"{row['method']}-{row['trial_id']}-{row['attempt']}"
        options = flat.options(row) | {name: row[name] for name in ("status", "trial_id", "cell_id", "replicate")}
        try:
            place = campaign / store.WORK / self._name
            place.mkdir(parents=True, exist_ok=True)
            self._module.log(campaign.name, place, title, options, flat.measurements(row))
        except Exception as error:  # whatever a service raises: the measurement goes on
            self._failed = True
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"--log-to {self._name} failed and gets no further rows: {shown(first)}")


def _module(name: str) -> ModuleType:
    try:
        return import_module(f"sp_bench.driver.log_to.to_{name}")
    except ImportError as error:
        raise ConfigError(f"--log-to {name} needs a package: pip install 'sp-bench[{name}]' ({error})") from error
