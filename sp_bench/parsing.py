"""Frozen dataclasses from plain mappings. No Hydra, no torch; the worker reads the same schemas from JSON.

`parse` refuses unknown keys, wrong types and impossible values with the field's dotted name in the message.
"""

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A value that no trial can have; the message names the field, the value and the way out."""


def require_positive(config: Any, *names: str) -> None:
    """Each named field is positive, or None where the schema allows that."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            prefix = type(config).__name__.removesuffix("Config").lower()
            dotted = name if prefix in ("trial", "campaign") else f"{prefix}.{name}"
            raise ConfigError(f"{dotted}={value} must be positive")


@cache
def _schema(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def parse(cls: type[T], mapping: Mapping[str, Any], path: str = "") -> T:
    """Read dataclass `cls` from a plain mapping.

    Raises:
        ConfigError: unknown or missing key, wrong type, or a value that the dataclass itself refuses.
    """
    schema = _schema(cls)
    prefix = f"{path}." if path else ""
    for key in mapping:
        if key not in schema:
            near = difflib.get_close_matches(str(key), schema, n=1)
            hint = f"did you mean {prefix}{near[0]}? " if near else ""
            raise ConfigError(f"{prefix}{key} is not a field; {hint}fields: {', '.join(schema)}")
    missing = [
        prefix + f.name
        for f in fields(cls)  # pyright: ignore[reportArgumentType]
        if f.name not in mapping and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}")
    return cls(**{key: _value(schema[key], value, prefix + key) for key, value in mapping.items()})


def _value(kind: Any, value: Any, path: str) -> Any:
    """`value` as the annotated `kind`, or ConfigError naming `path`."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):  # Literal | None reads back as Optional
        return None if value is None else _value(typing.get_args(kind)[0], value, path)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}={value!r} must be a group of fields")
        return parse(kind, value, path)
    if origin is Literal:
        valid = typing.get_args(kind)
        if value not in valid:
            near = difflib.get_close_matches(str(value), map(str, valid), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{path}={value!r}: {hint}use one of {', '.join(map(str, valid))}")
        return value
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise ConfigError(f"{path}={value!r} must map names to strings")
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ConfigError(f"{path}={value!r} must be {names[kind]}")
    return value
