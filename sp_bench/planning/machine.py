"""This machine, as a plan sees it: GPUs, memory, and which trials it can run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sp_bench import hardware
from sp_bench.config.trial import TrialConfig
from sp_bench.planning import allocation, plan, proofs
from sp_bench.planning.device_time import peak_device
from sp_bench.planning.plan import Trial
from sp_bench.planning.settings import CampaignConfig


@dataclass(frozen=True)
class Machine:
    """This machine, for a run with these settings."""

    settings: CampaignConfig
    gpus: hardware.Gpus | None  # None: no NVIDIA driver, or no trial asks for GPUs

    @property
    def smallest_gpu_bytes(self) -> int | None:
        return min((gpu.memory_bytes for gpu in self.gpus.devices), default=None) if self.gpus else None

    @property
    def device_name(self) -> str | None:
        return self.gpus.devices[0].name if self.gpus and self.gpus.devices else None

    def gpu_bytes(self, config: TrialConfig) -> int | None:
        """Memory of the smallest GPU here. Without GPUs, that of the device that `hardware` names, if it is known."""
        return self.smallest_gpu_bytes or (None if self.gpus else hardware.device_bytes(peak_device(config, None)))

    def plan(self, configs: Sequence[TrialConfig], replicates: int) -> list[Trial]:
        trials = plan.plan(
            configs,
            replicates,
            self.settings.order_seed,
            num_gpus=len(self.gpus.devices) if self.gpus else None,
            host_bytes=hardware.host_bytes(),
            device_name=self.device_name,
            measure_s=self.settings.deadlines.measure,
            warmup_s=self.settings.deadlines.warmup,
            num_hosts=allocation.here().num_hosts,
        )
        return [replace(trial, unsupported_reason=self._reason(trial)) for trial in trials]

    def _reason(self, trial: Trial) -> str | None:
        if self.gpus and self.gpus.problem and trial.config.hardware.device == "cuda":
            return self.gpus.problem
        return trial.unsupported_reason or proofs.missing_reason(trial.config, self.settings.proofs_folder)

    def refusal(self, config: TrialConfig) -> str | None:
        """Why a trial cannot run here, or None. Without GPUs here: why it could not run on any machine that has
        them."""
        if self.device_name is None and config.hardware.device == "cuda":
            return plan.reason_anywhere(config, self.settings.deadlines.measure, self.settings.deadlines.warmup)
        (trial,) = self.plan([config], 1)
        return trial.unsupported_reason
