"""What trains a decoder around its attention: sharding of parameters, loss, optimizer. One file an engine.

To add one: a file with the functions of `Engine`, what it is in FACTS of config/engine.py, what it can run in
`requirements`, conf/engine/<name>.yaml, and a line in the parametrised tests. The driver knows `requirements` only,
which imports no torch. One that stays outside this package is brought by the entry point group sp_bench.engines, and
says itself what it can run (`OutsideEngine`): docs/OUTSIDE.md.
"""

import importlib
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from sp_bench.config import outside
from sp_bench.config.engine import FACTS
from sp_bench.config.outside import CannotImport, Source
from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.attention import Traffic

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from sp_bench.training.train import StepResult, Tick, Watch

NAMES = tuple(FACTS)


class Engine(Protocol):
    """A module of this package, or from outside."""

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
        tick: "Tick",
        *,
        token_losses: int,
        watch: "Watch | None" = None,
    ) -> "list[StepResult]":
        """Build model and optimizer from `config.seed` and take one optimizer step on each text, the sequences
        [m*D*B,S+1] of all micro-batches of all data-parallel ranks (`train.micro_batches` cuts them). `tick` is called
        before the first step and after each; it returns True after the last that is wanted, which may come before the
        texts are over. `token_losses`: the results of so many steps, from the first, must have
        them. `watch` is shown the gradients of each optimizer step before they are clipped (`train.Part`, in any
        order); the optimizer is one of torch's kind, whose hooks tell of its steps.

        Every rank of the world calls it. What it changed in the process is as before when it returns.
        """
        ...


class OutsideEngine(Engine, Protocol):
    """What an engine from outside must also define; for ours `requirements` has it."""

    IMPLEMENTATION: str  # whose code
    READS_UNLABELLED: bool  # may be left out: it knows that a negative number of a text, ~t, is token t but no label
    BATCH_LOADING: str  # before | in_step, as `requirements.batch_loading` says

    @staticmethod
    def unsupported_reason(config: TrialConfig) -> Prose | None:
        """Why it cannot run this trial, naming what would work, or None."""
        ...


_EXAMPLES: Mapping[str, Prose] = {
    "IMPLEMENTATION": 'IMPLEMENTATION = "my_lab"  # whose code',
    "BATCH_LOADING": 'BATCH_LOADING = "before"  # the tokens are on the device before the first step; or "in_step"',
    "UNPREDICTED": 'UNPREDICTED = ("parameters", "gradients")  # phases whose bytes have no closed form',
    "UNLABELLED": "UNLABELLED = 0  # tokens at the end of a sequence that the loss leaves out",
    "unsupported_reason": "def unsupported_reason(config): return None",
    "traffic": "def traffic(config, padded_len): return {}",
    "run": "def run(config, texts, mesh, device, tick, *, token_losses, watch=None): return results",
}


def names() -> list[str]:
    """All engines: ours, then those from outside."""
    return [*NAMES, *outside.sources("engine", NAMES)]


def source_of(name: str) -> Source | None:
    """Where an engine from outside comes from; None: it is one of ours, or there is none of that name."""
    return outside.source_of("engine", name, NAMES)


def get(name: str) -> Engine:
    """The engine called `name`.

    Raises:
        ConfigError: as `get_outside`.
    """
    return cast(Engine, importlib.import_module(f"{__name__}.{name}")) if name in NAMES else get_outside(name)


def reads_unlabelled(name: str) -> bool:
    """Whether the engine called `name` may get texts whose sequences have different numbers of labels (`text.py`).
    Ours do. One from outside says so; without that it is proven on texts of which each token is a label."""
    return name in NAMES or bool(getattr(get_outside(name), "READS_UNLABELLED", False))


def get_outside(name: str) -> OutsideEngine:
    """The engine from outside called `name`. One that cannot be imported comes as a stand-in that raises the error in
    `run`.

    Raises:
        ConfigError: no such engine (the nearest name and all names are given), or one that lacks something.
    """
    source = outside.require_source("engine", name, NAMES)
    try:
        module = outside.load(source)
    except CannotImport as error:
        return _stand_in(error)
    outside.require(source, module, _EXAMPLES, {"unsupported_reason": 1, "traffic": 2})
    return cast(OutsideEngine, module)


def _stand_in(error: CannotImport) -> OutsideEngine:
    def run(*_: Any, **__: Any) -> NoReturn:
        raise ImportError(str(error))

    stand_in = types.SimpleNamespace(
        IMPLEMENTATION="cannot be imported",
        BATCH_LOADING="unknown",
        UNPREDICTED=(),
        UNLABELLED=0,
        unsupported_reason=lambda config: None,
        traffic=lambda config, padded_len: {},
        run=run,
    )
    return cast(OutsideEngine, stand_in)
