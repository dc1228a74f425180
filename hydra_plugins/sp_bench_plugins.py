"""Where Hydra looks for launchers and sweepers. Thin: what they do is sp_bench's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import campaign, progress, sweep
from sp_bench.driver.settings import CampaignConfig
from sp_bench.rows import store


class Reporter:
    """Makes reports; they draw with matplotlib, which planning does not need."""

    def effort(self, folder: Path) -> str:
        from sp_bench.report.effort import effort

        rows, _ = store.read(folder, ("status", "duration_s", "phase_s"))
        return effort(rows.to_pylist()).summary()

    def build(self, folder: Path) -> campaign.Built:
        from sp_bench import report

        return report.build([folder])


class BlockSweeper(Sweeper):
    """Expands a union of products (conf/sweep/*.yaml) and hands the whole list over at once."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.overrides = list(overrides)  # of the cells: Hydra composes the campaign alone, without them

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins  # imports this module while it looks for plugins

        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None
        assert self.launcher is not None
        blocks = sweep.merge_blocks(_plain(self.config).get("sweep", {}).get("blocks", []), self.overrides)
        points = sweep.expand(blocks, _settings(self.config).max_points)
        return self.launcher.launch([[*arguments, *point] for point in points], initial_job_idx=0)


class LocalLauncher(Launcher):
    """Composes every point, then runs the trials on this machine, one after another - or shows the one there is."""

    def __init__(self, show_config: bool = False) -> None:
        self.show_config = show_config

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self._default = sweep.trial_mapping(_plain(config))
        self._chosen: dict[str, dict[str, Any]] = {}  # by the line that chooses a file

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        composed = (self._compose(overrides) for overrides in progress.composing(job_overrides))
        if self.show_config:
            for trial in composed:  # one: --cfg takes no sweeps
                _show(trial, self.config)
            return []
        campaign.run([parse(TrialConfig, each) for each in composed], _settings(self.config), Reporter())
        return []

    def _compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The fields of one trial, and of its groups those that the chosen files have."""
        files, options = sweep.split_point(overrides)
        return sweep.with_options(
            self._default | {group: self._choose(group, line) for group, line in files.items()}, options
        )

    def _choose(self, group: str, line: str) -> dict[str, Any]:
        """A file of one group says nothing of another: Hydra, which takes 0.2 s each time, composes each choice once,
        and not each combination of them."""
        if line not in self._chosen:
            loader = self.hydra_context.config_loader
            self._chosen[line] = _plain(loader.load_sweep_config(self.config, [line]))[group]
        return self._chosen[line]


def _show(trial: dict[str, Any], config: DictConfig) -> None:
    """A configuration as YAML, once `run` would take it."""
    parse(TrialConfig, trial)
    _settings(config)
    print(OmegaConf.to_yaml(OmegaConf.create(_plain(config) | trial)), end="")


def _settings(config: DictConfig) -> CampaignConfig:
    return parse(CampaignConfig, sweep.campaign_mapping(_plain(config)))


def _plain(config: DictConfig) -> dict[str, Any]:
    """Our part of a composed config as plain values."""
    ours = {str(key): value for key, value in config.items() if key != "hydra"}
    return {key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for key, value in ours.items()}
