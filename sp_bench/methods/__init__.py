"""Sequence-parallel attention methods: the registry. One file a method; adapters to other libraries are methods too.

    method.py        what a method is, and what it yields
    refusals.py      what no method computes unless it says so
    closed_forms.py  what a trial must send and compute
    real_rank.py     which rank of a world of one is there
    from_outside.py  what a method from outside must have

To add one to this package: a file with the functions of `Method`, its name in NAMES, conf/method/<name>.yaml, and a
line in the parametrised tests; of a library, a line in sp_bench/costs/patterns.py and in its table in docs/METHODS.md
too. Module level imports no torch: planning reads `unsupported_reason` and `traffic` without it. A method that stays
outside needs its own file or package only: docs/OUTSIDE.md.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config import outside
from sp_bench.config.method import MethodConfig
from sp_bench.config.outside import CannotImport, Source
from sp_bench.config.parsing import ConfigError, parse
from sp_bench.config.shape import AttentionShape
from sp_bench.config.trial import TrialConfig
from sp_bench.kernels import Kernel
from sp_bench.methods.from_outside import FIELDS, checked, stand_in
from sp_bench.methods.method import (
    Method,
    SequenceParallelAttention,
    installed,
    layout_of_heads,
    missing_library_reason,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Method", "SequenceParallelAttention", "installed", "layout_of_heads", "missing_library_reason"]

NAMES = (
    *("single", "ulysses", "upipe", "ring", "double_ring", "all_gather", "usp", "state_passing"),
    *("ring_flash_attn", "deepspeed_ulysses", "yunchang", "torch_context_parallel", "transformer_engine"),
    *("deepspeed_ulysses_hf", "ring_flash_attn_llama3", "fla_context_parallel"),
)


def names() -> list[str]:
    """All methods: ours, then those from outside."""
    return [*NAMES, *outside.sources("method", NAMES)]


def get(name: str) -> Method:
    """The method called `name`. One that cannot be imported comes as a stand-in that raises the error in `open`: its
    trials end as `error`, and a sweep goes on.

    Raises:
        ConfigError: no such method (the nearest name and all names are given), or one that lacks something.
    """
    if name in NAMES:
        return cast(Method, importlib.import_module(f"{__name__}.{name}"))
    source = outside.require_source("method", name, NAMES)
    try:
        return checked(source, outside.load(source))
    except CannotImport as error:
        return stand_in(error)


def layout_of(config: TrialConfig) -> SequenceLayout:
    """Which rank of a sequence's group has which tokens."""
    return get(config.method.name).layout(config.method, config.sp_size)


def mesh_of(config: TrialConfig) -> "DeviceMesh":
    """The mesh of the trial's ranks. Every rank of the world calls it."""
    from sp_bench.attention import meshes

    return meshes.of_trial(config, layout_of(config))


def source_of(name: str) -> Source | None:
    """Where a method from outside comes from; None: it is one of ours, or there is none of that name."""
    return outside.source_of("method", name, NAMES)


def import_error(name: str) -> str | None:
    """Why a method from outside cannot be imported, or None."""
    if source := source_of(name):
        try:
            outside.load(source)
        except CannotImport as error:
            return str(error)
    return None


def add_file(path: Path) -> str:
    """Make the method of a file known to this process; returns its name.

    Raises:
        ConfigError: no such file, or another method of that name.
    """
    name = outside.add_file(path)
    names()  # refuses a name that is taken
    return name


def outside_choice(name: str) -> dict[str, Any] | None:
    """What conf/method/<name>.yaml would say of a method from outside: its fields and its own options, side by side, at
    their defaults. None: no method from outside."""
    if source_of(name) is None:
        return None
    options = getattr(get(name), "Options", None)
    return {"name": name, "layout": "contiguous"} | (asdict(options()) if options else {})


def with_own_options(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The `method` of a composed trial, as `parse(MethodConfig, ...)` takes it: own options of a method from outside,
    which stand beside the fields there, are checked and put into `own`.

    Raises:
        ConfigError: no such option, or a value that it cannot have.
    """
    name = mapping["name"]
    own = {key: value for key, value in mapping.items() if key not in FIELDS}
    if not own or source_of(name) is None:
        return dict(mapping)
    if not import_error(name):  # what cannot be imported cannot say what its options are
        try:
            own = asdict(parse(getattr(get(name), "Options"), own, "method"))  # noqa: B009
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"method {name}: {error}") from None
    return {key: value for key, value in mapping.items() if key in FIELDS} | {"own": own}


def primitive(method: MethodConfig) -> str:
    """The collective that moves the attention tensors.

    Raises:
        ConfigError: a variant that the method does not have.
    """
    own = get(method.name).PRIMITIVE
    if isinstance(own, str) and method.variant is not None:
        raise ConfigError(f"method.variant={method.variant}: {method.name} has no variants; leave it out")
    if not isinstance(own, str):
        if method.variant is None or method.variant not in own:
            raise ConfigError(f"method.variant={method.variant}: {method.name} has {', '.join(own)}")
        return own[method.variant]
    return own


def ring_degrees(method: MethodConfig, sp_size: int) -> tuple[int, int] | None:
    """The ranks of the inner and of the outer ring, of a method that has both."""
    own = getattr(get(method.name), "ring_degrees", None)
    return None if own is None else own(method, sp_size)


@contextmanager
def opened(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    """The method's attention of what a step of `shape` begins with: q, k and v, or q, latents and up-projections."""
    with get(method.name).open(method, kernel, shape, mesh) as attention:
        projects = shape.kv_lora_rank is not None and method.sends is None
        yield attention.of_latents(kernel, shape.head_dim) if projects else attention


def open_counted(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> AbstractContextManager[SequenceParallelAttention]:
    """The method, opened with `kernel`, whose calls the ledger counts if the method says how many there are."""
    from sp_bench.measure.ledger import CountedKernel

    module = get(method.name)
    counts = hasattr(module, "kernel_calls") and not shape.gated_delta  # of which each call is counted anyway
    return opened(method, CountedKernel(kernel) if counts else kernel, shape, mesh)
