"""All options of a trial, from the declarations in their dataclasses, and the text that identities hash."""

import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal

from sp_bench.config.declared import Declared
from sp_bench.config.trial import TrialConfig


@dataclass(frozen=True, kw_only=True)
class Option(Declared):
    """One field of a TrialConfig: its declaration, with default names and meanings filled in."""

    path: str  # as it is overridden: method.head_chunks
    type: type  # of a value that is not None: str for a choice

    @property
    def group(self) -> str:
        """The option's group; empty for a field of the trial itself."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def value(self, config: TrialConfig) -> Any:
        """The option's value in a config."""
        return getattr(getattr(config, self.group) if self.group else config, self.name)

    def cell(self, config: TrialConfig) -> Any:
        """The value in a row's column: null if the workload does not use the option."""
        if self.of and config.workload.name not in self.of:
            return None
        value = self.value(config)
        return self.old_rows if value is None else value


def _declared(cls: type) -> Iterator[tuple[str, Any, Declared | None]]:
    """(name, type, declaration) of each field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        hint, declared = hints[field.name], None
        if typing.get_origin(hint) is Annotated:
            hint, declared = typing.get_args(hint)
        yield field.name, hint, declared


def _options(cls: type, prefix: str = "") -> Iterator[Option]:
    for name, kind, declared in _declared(cls):
        if is_dataclass(kind):
            yield from _options(typing.cast(type, kind), f"{prefix}{name}.")
        elif declared is None:
            raise TypeError(f"{cls.__name__}.{name} is not declared: annotate it with Declared(...)")
        else:
            filled = {
                "column": name if declared.column == "" else declared.column,
                "none_means": declared.old_rows if declared.none_means is None else declared.none_means,
            }
            yield Option(**vars(declared) | filled, path=prefix + name, type=_value_type(kind))


def _value_type(kind: Any) -> type:
    """The type of values that are not None: `str` for Literal["a", "b"] | None."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return _value_type(typing.get_args(kind)[0])
    if typing.get_origin(kind) is Literal:
        return type(typing.get_args(kind)[0])
    return typing.get_origin(kind) or kind


OPTIONS: tuple[Option, ...] = tuple(_options(TrialConfig))
BY_PATH: Mapping[str, Option] = {option.path: option for option in OPTIONS}
BY_COLUMN: Mapping[str, Option] = {option.column: option for option in OPTIONS if option.column}


def _plain(value: Any) -> Any:
    """A config as plain values without None. Much faster than dataclasses.asdict, which copies each leaf."""
    if value is None or isinstance(value, str | int | float):
        return value
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return value


def _omitted(cls: type, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """(group or empty, field, the value omitted from the hash)."""
    for name, kind, declared in _declared(cls):
        if declared and declared.omitted:
            yield prefix, name, _plain(declared.old_rows)
        elif is_dataclass(kind):
            yield from _omitted(typing.cast(type, kind), name)


_OMITTED = tuple(_omitted(TrialConfig))


def canonical(config: TrialConfig) -> str:
    """The config as canonical JSON, which identities hash: equal configs give equal text. Keys are sorted. Options that
    are None are omitted, and newer options at the value that older rows imply."""
    plain = _plain(config)
    for group, name, only in _OMITTED:
        inside = plain[group] if group else plain
        if inside.get(name) == only:
            del inside[name]
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def as_overridden(path: str) -> str:
    """The key that sets the option at `path` on a command line. An option of a method from outside is method.own.NAME
    in the config and method.NAME on the command line."""
    return path.replace("method.own.", "method.", 1)
