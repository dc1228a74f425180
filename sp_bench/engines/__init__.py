"""What trains a decoder around its attention: sharding of parameters, loss, optimizer. One file an engine.

To add one: a file with the functions of `Engine`, its name in config.EngineName, what it can run in `support`,
conf/engine/<name>.yaml, and a line in the parametrised tests. The driver knows `support` only, which imports no torch.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast, get_args

from sp_bench.config.trial import EngineName, TrialConfig
from sp_bench.costs.attention import Traffic

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from sp_bench.training.train import StepResult

NAMES: tuple[str, ...] = get_args(EngineName)


class Engine(Protocol):
    """A module of this package."""

    UNPREDICTED: tuple[str, ...]  # phases of the ledger whose bytes it decides while it runs: counted, not predicted
    UNLABELLED: int  # tokens at the end of each sequence whose successor its data loader drops

    @staticmethod
    def traffic(config: TrialConfig, padded_len: int) -> Traffic:
        """Bytes one rank sends off-rank in one step, by phase and op, but for the phases in UNPREDICTED."""
        ...

    @staticmethod
    def run(
        config: TrialConfig,
        texts: "Sequence[Tensor]",
        mesh: "DeviceMesh",
        device: "torch.device",
        tick: Callable[[], None],
        *,
        token_losses: bool,
    ) -> "list[StepResult]":
        """Build model and optimizer from `config.seed` and take one optimizer step on each text, the sequences
        [m*D*B,S+1] of all micro-batches of all data-parallel ranks (`train.micro_batches` cuts them). `tick` is called
        before the first step and after each. `token_losses`: the results must have them.

        Every rank of the world calls it. What it changed in the process is as before when it returns.
        """
        ...


def get(name: str) -> Engine:
    assert name in NAMES, name
    return cast(Engine, importlib.import_module(f"{__name__}.{name}"))
