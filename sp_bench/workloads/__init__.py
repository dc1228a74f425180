"""What one step is: one file a workload. Each proves its method right, then measures.

To add one: a file with `run`, its name in `WorkloadConfig.name` and conf/workload/<name>.yaml.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from sp_bench.config.trial import TrialConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from sp_bench.measure.timing import EnterPhase, Measurement


@dataclass(frozen=True)
class Job:
    """What a workload runs in. `mesh` has the axes dp_replicate, dp_shard, ring and ulysses, the last two in the
    placement order of the method's layout; a method opens it."""

    config: TrialConfig
    mesh: "DeviceMesh"
    device: "torch.device"
    enter_phase: "EnterPhase"


class Workload(Protocol):
    """A module of this package."""

    @staticmethod
    def run(job: Job) -> "Measurement":
        """Correctness first, then `measure`. Every rank of the world calls it.

        Raises:
            Incorrect: the method did not compute what it must.
        """
        ...


def get(name: str) -> Workload:
    return cast(Workload, importlib.import_module(f"{__name__}.{name}"))
