"""What one step is. Each workload is a file; it proves its method right, then measures it.

attention   one attention call, forward or forward and backward
train_step  one optimizer step of a whole decoder
parity      as train_step, and each step compared with training on one process
stream      as parity, with a length of sequences that changes from stage to stage
collective  one message of the method's primitive, at many sizes
step, arms  (no workloads) one attention step; the same step without communication or without kernels

To add one: a file with `run`, its name in `WorkloadConfig.name` and in PASS_KINDS, and conf/workload/<name>.yaml.
"""

import importlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from sp_bench.config.trial import TrialConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from sp_bench.measure.timing import EnterPhase, Measurement


@dataclass(frozen=True)
class Job:
    """What a workload runs in, on each rank.

    `mesh` has the axes dp_replicate, dp_shard, ring and ulysses. The method's layout says in which order the last two
    are placed.
    """

    config: TrialConfig
    mesh: "DeviceMesh"
    device: "torch.device"
    enter_phase: "EnterPhase"
    traces: Path  # a folder for traces of this trial
    replicate: int = 0
    proof: Mapping[str, Any] | None = None  # of an earlier trial of the same options, code and machine
    check_s: dict[str, float] = field(default_factory=dict)  # row column

    @contextmanager
    def checking(self, name: str) -> Iterator[None]:
        """The check `name` runs inside, and its seconds are kept."""
        start = time.perf_counter()
        yield
        self.check_s[name] = time.perf_counter() - start

    @property
    def proves(self) -> bool:
        """Whether its values are proven. One real rank's are wrong by design, and proven elsewhere."""
        return self.config.world == "ranks"

    @property
    def trace_to(self) -> Path | None:
        """Where the untimed step is traced; None: nobody asked for it."""
        return self.traces if self.config.workload.trace else None


class Workload(Protocol):
    """A module of this package."""

    @staticmethod
    def run(job: Job) -> "Measurement":
        """Prove the method right, then measure it. Every rank of the world calls it.

        Raises:
            Incorrect: the method did not compute what it must.
        """
        ...


def get(name: str) -> Workload:
    """The workload called `name`, which the config has checked."""
    return cast(Workload, importlib.import_module(f"{__name__}.{name}"))
