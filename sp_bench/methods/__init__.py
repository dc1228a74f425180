"""Sequence-parallel attention methods. One file a method; adapters to other libraries are methods too.

To add one: a file with the functions of `Method`, its name in NAMES, conf/method/<name>.yaml, and a line in the
parametrised tests; of a library, a line in sp_bench/costs/patterns.py and in its table in docs/METHODS.md too. Module
level imports no torch: planning reads `unsupported_reason` and `traffic` without it.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from sp_bench import hardware
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.parsing import ConfigError, nearest
from sp_bench.config.trial import AttentionShape, MethodConfig
from sp_bench.costs.attention import Traffic
from sp_bench.kernels import Kernel

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

NAMES = (
    *("single", "ulysses", "ring", "all_gather", "usp"),
    *("ring_flash_attn", "deepspeed_ulysses", "yunchang", "torch_context_parallel", "transformer_engine"),
    *("deepspeed_ulysses_hf", "ring_flash_attn_llama3"),
)


@dataclass(frozen=True)
class SequenceParallelAttention:
    """What an opened method yields: an attention function, and which tokens its ranks hold."""

    layout: SequenceLayout
    attend: "Callable[[Tensor, Tensor, Tensor], Tensor]"

    def __call__(self, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        """q [B,S/P,Hq,D], k and v [B,S/P,Hkv,D] -> [B,S/P,Hq,D]; differentiable; tokens in `layout` order."""
        return self.attend(q, k, v)


class Method(Protocol):
    """A module of this package."""

    IMPLEMENTATION: str  # whose code: sp_bench, or the library and its version (`installed`)
    PRIMITIVE: str | Mapping[str, str]  # the collective that moves the attention tensors; of each variant, if several

    @staticmethod
    def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
        """Which token lives where.

        Raises:
            ConfigError: options that no shape could make valid.
        """
        ...

    @staticmethod
    def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> str | None:
        """Why this method cannot split `shape` and run that kernel on the parts, naming what would work, or None.

        Whether `seq_len` can be cut is the layout's to say.
        """
        ...

    @staticmethod
    def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
        """Bytes one rank sends off-rank in one attention call: forward and backward."""
        ...

    @staticmethod
    def open(
        method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
    ) -> AbstractContextManager[SequenceParallelAttention]:
        """`mesh` has the axes `ring` and `ulysses` innermost, in the layout's placement order, so that a rank of the
        world modulo sp_size is its rank in the sequence."""
        ...


_assumed_installed: ContextVar[bool] = ContextVar("assumed_installed", default=False)


@contextmanager
def as_if_installed() -> Iterator[None]:
    """Adapters say what their libraries could split, were they here."""
    token = _assumed_installed.set(True)
    try:
        yield
    finally:
        _assumed_installed.reset(token)


def installed(package: str) -> str:
    """`package==version` of a library here, or its name alone where it is not installed."""
    version = hardware.package_versions().get(package)
    return f"{package}=={version}" if version else package


def missing_library_reason(method: str, extra: str, *packages: str) -> str | None:
    """Why an adapter cannot run without the package that `extra` is named after, and `packages`, or None."""
    if _assumed_installed.get():
        return None
    missing = [name for name in (extra, *packages) if name not in hardware.package_versions()]
    if not missing:
        return None
    return f"method {method} needs {' and '.join(missing)}: pip install 'sp-bench[{extra}]'"


def primitive(method: MethodConfig) -> str:
    """The collective that moves the attention tensors.

    Raises:
        ConfigError: a variant that the method does not have.
    """
    own = get(method.name).PRIMITIVE
    if isinstance(own, str) and method.variant is not None:
        raise ConfigError(f"method.variant={method.variant}: {method.name} has no variants; leave it away")
    if not isinstance(own, str):
        if method.variant is None or method.variant not in own:
            raise ConfigError(f"method.variant={method.variant}: {method.name} has {', '.join(own)}")
        return own[method.variant]
    return own


def get(name: str) -> Method:
    """The method called `name`.

    Raises:
        ConfigError: no such method; the nearest name and all names are given.
    """
    if name not in NAMES:
        raise ConfigError(f"method={name}: {nearest(name, NAMES)}methods: {', '.join(NAMES)}")
    return cast(Method, importlib.import_module(f"{__name__}.{name}"))
