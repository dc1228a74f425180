"""What a method from outside must have, and what stands in for one that cannot be imported."""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, NoReturn, cast

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config import outside
from sp_bench.config.method import MethodConfig
from sp_bench.config.outside import CannotImport, Source
from sp_bench.config.parsing import SCALARS, ConfigError
from sp_bench.config.prose import Prose
from sp_bench.methods.method import Method

_EXAMPLES: Mapping[str, Prose] = {
    "IMPLEMENTATION": 'IMPLEMENTATION = "my_lab"  # whose code',
    "PRIMITIVE": 'PRIMITIVE = "send_recv"  # the collective that moves the attention tensors',
    "layout": "def layout(method, sp_size): return SequenceLayout(method.layout, ring_degree=sp_size)",
    "unsupported_reason": "def unsupported_reason(method, kernel_name, shape, sp_size): return None",
    "traffic": "def traffic(method, shape, sp_size): return ring_traffic(shape, sp_size, 1, None), or traffic = None "
    "if the bytes have no closed form",
    "open": "@contextmanager, def open(method, kernel, shape, mesh): yield SequenceParallelAttention(layout, attend)",
}
_CALLS_EXAMPLE: Mapping[str, Prose] = {
    "kernel_calls": "def kernel_calls(method, shape, sp_size, rank): return 1, 1  # forward, backward"
}
_NUM_ARGUMENTS = {"layout": 2, "unsupported_reason": 4, "traffic": 3, "open": 4}
FIELDS = tuple(field.name for field in fields(MethodConfig))


def checked(source: Source, module: Any) -> Method:
    """`module`, if it has all that a method from outside must have.

    Raises:
        ConfigError: one line that names the source, the attribute and how it is written.
    """
    outside.require(source, module, _EXAMPLES, _NUM_ARGUMENTS, may_be_none="traffic")
    for name in ("IMPLEMENTATION", "PRIMITIVE"):
        if not isinstance(getattr(module, name), str):
            raise ConfigError(f"{source}: {name} must be text; write: {_EXAMPLES[name]}")
    if module.IMPLEMENTATION == "sp_bench":
        raise ConfigError(
            f"{source}: IMPLEMENTATION = sp_bench says that it is ours; write: {_EXAMPLES['IMPLEMENTATION']}"
        )
    if hasattr(module, "kernel_calls"):
        outside.require(source, module, _CALLS_EXAMPLE, {"kernel_calls": 4})
    _check_options(source, getattr(module, "Options", None))
    return cast(Method, module)


def _check_options(source: Source, options: Any) -> None:
    if options is None:
        return
    if not (isinstance(options, type) and is_dataclass(options) and options.__dataclass_params__.frozen):  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            f"{source}: Options is no frozen dataclass; write @dataclass(frozen=True) above class Options"
        )
    kinds = typing.get_type_hints(options)
    for field in fields(options):
        said: Prose = f"{source}: Options.{field.name}"
        if field.name in ("name", "path", *FIELDS):
            raise ConfigError(f"{said} is a field of every method's config; give it another name")
        if field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{said} has no default; write: {field.name}: int = 1")
        if not _is_plain(kinds[field.name]):
            raise ConfigError(f"{said} must be int, float, bool, str or a Literal of them, or one of these | None")


def _is_plain(kind: Any) -> bool:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind, *others = typing.get_args(kind)
        if others != [type(None)]:
            return False
    return kind in SCALARS or typing.get_origin(kind) is Literal


def stand_in(error: CannotImport) -> Method:
    def open(*_: Any) -> NoReturn:
        raise ImportError(str(error))

    module = types.SimpleNamespace(
        IMPLEMENTATION="cannot be imported",
        PRIMITIVE="unknown",
        layout=lambda method, sp_size: SequenceLayout(method.layout, ring_degree=sp_size),
        unsupported_reason=lambda *_: None,
        traffic=None,
        open=open,
    )
    return cast(Method, module)
