"""Frozen dataclasses from plain mappings. No Hydra, no torch; the worker reads the same schemas from JSON.

`parse` refuses unknown keys, wrong types and impossible values with the field's dotted name in the message.
"""

import difflib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Literal, TypeVar

from sp_bench.config.prose import Prose

T = TypeVar("T")
SCALARS: Mapping[Any, Prose] = {
    int: "a whole number in plain digits",
    float: "a number",
    bool: "true or false",
    str: "text",
}
MAX_INT = 2**63 - 1  # the largest of a row's column


class ConfigError(ValueError):
    """An impossible value. The message names the field, the value and a way out."""


def shown(text: object, limit: int = 200) -> Prose:
    """Text from outside on one line: control characters are escaped, and a long text is cut."""
    characters = str(text)
    plain = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in characters[: limit + 1]
    )
    return plain if len(plain) <= limit else f"{plain[: limit // 2]}... ({len(characters):,} characters)"


def nearest(name: object, valid: Iterable[object], prefix: str = "") -> Prose:
    """`did you mean NAME? ` with the nearest valid name; empty if none is near."""
    near = difflib.get_close_matches(str(name), map(str, valid), n=1)
    return f"did you mean {prefix}{near[0]}? " if near else ""


def require_at_most(config: Any, limit: int, *names: str) -> None:
    """Refuse named fields above `limit`, which no machine reaches and loops can count to. None passes."""
    for name in names:
        if (value := getattr(config, name)) is not None and value > limit:
            raise ConfigError(f"{_dotted(config, name)}={value} is more than {limit}; use less")


def require_at_least(config: Any, limit: int, *names: str) -> None:
    """Refuse named fields below `limit`."""
    for name in names:
        if (value := getattr(config, name)) < limit:
            raise ConfigError(f"{_dotted(config, name)}={value} is less than {limit}; use more")


def require_positive(config: Any, *names: str) -> None:
    """Refuse named fields that are not positive. None passes if the schema allows it."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{_dotted(config, name)}={value} must be positive")


def require_plain_name(config: Any, name: str) -> None:
    """Refuse a name that some file system does not allow for a folder, or that needs quotes in a shell."""
    value = getattr(config, name)
    plain = value.isascii() and all(c.isalnum() or c in "._-" for c in value)
    if not (0 < len(value) <= 100 and value[0].isalnum() and plain):
        raise ConfigError(
            f"{_dotted(config, name)}={shown(repr(value))}: use letters, digits, '.', '_' and '-', at most 100, "
            "beginning with a letter or digit"
        )


def require_path(config: Any, name: str) -> None:
    """Refuse a path below which no file system could have files."""
    value = getattr(config, name)
    if problem := _path_problem(value):
        raise ConfigError(f"{_dotted(config, name)}={shown(repr(value))} {problem}")


def _path_problem(path: str) -> Prose | None:
    if not path.strip():
        return "is empty; use a path such as results"
    if not path.isprintable():
        return "has a character that cannot be printed; use plain ones"
    if path[0] in "-~":
        return f"begins with {path[0]!r}, which shells and tools take for something else; use ./{path[0]}... or another"
    if len(path.encode()) > 1000 or any(len(part.encode()) > 255 for part in path.split("/")):
        return "is longer than file systems allow: at most 255 bytes a folder, 1000 in all"
    return None


def _dotted(config: Any, name: str) -> str:
    prefix = type(config).__name__.removesuffix("Config").lower()
    return name if prefix in ("trial", "campaign") else f"{prefix}.{name}"


@cache
def _schema(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _required(cls: Any) -> list[str]:
    return [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]


def parse(cls: type[T], mapping: Mapping[str, Any], path: str = "") -> T:
    """Read dataclass `cls` from a plain mapping.

    Raises:
        ConfigError: unknown or missing key, wrong type, or a value that the dataclass itself refuses.
    """
    schema = _schema(cls)
    prefix = f"{path}." if path else ""
    for key in mapping:
        if key not in schema:
            hint = nearest(key, schema, prefix)
            raise ConfigError(f"{prefix}{shown(key)} is not a field; {hint}fields: {', '.join(schema)}")
    missing = [prefix + name for name in _required(cls) if name not in mapping]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}")
    return cls(**{key: _value(schema[key], value, prefix + key) for key, value in mapping.items()})


def _value(kind: Any, value: Any, path: str) -> Any:
    """`value` as the annotated `kind`, or ConfigError naming `path`."""
    if kind in SCALARS:  # first: nearly all are, and a large sweep has a million of them
        return _scalar(kind, value, path)
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):  # Literal | None reads back as Optional
        first, *others = typing.get_args(kind)
        if value is None and types.NoneType in others:
            return None
        words = [word for other in others for word in typing.get_args(other)]  # of int | Literal["auto"]
        if value in words:
            return value
        return _scalar(first, value, path, words) if first in SCALARS else _value(first, value, path)
    if origin is Literal:
        valid = typing.get_args(kind)
        if value not in valid:
            hint = nearest(value, valid)
            raise ConfigError(f"{path}={shown(repr(value))}: {hint}use one of {', '.join(map(str, valid))}")
        return value
    if origin is Mapping:
        item = typing.get_args(kind)[1]
        if not isinstance(value, Mapping) or not all(isinstance(v, item) for v in value.values()):
            of: Prose = "strings" if item is str else "text, numbers, true or false"
            raise ConfigError(f"{path}={shown(repr(value))} must map names to {of}")
        return dict(value)
    if origin is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{path}={shown(repr(value))} must be a list of texts")
        return tuple(value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}={shown(repr(value))} must be a group of fields")
    return parse(kind, value, path)


def _scalar(kind: type, value: Any, path: str, words: Sequence[str] = ()) -> Any:
    """words: what the field may be instead of a `kind`, for the message."""
    if type(value) is int and abs(value) > MAX_INT:
        raise ConfigError(f"{path} does not fit into 64 bits; use less")
    if type(value) is float and not math.isfinite(value):
        raise ConfigError(f"{path}={value} must be a finite number")
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    quote: Prose = (
        f"; in a file quote it; on a command line quote it twice: \"'{value}'\", all of a list" if kind is str else ""
    )
    thousands = re.fullmatch(r"(\d{1,9})([kKmM])", str(value)) if kind is int else None
    if thousands:
        quote = f": {int(thousands[1]) * 1024 ** ('km'.index(thousands[2].lower()) + 1)}"
    raise ConfigError(f"{path}={shown(repr(value))} must be {' or '.join([SCALARS[kind], *words])}{quote}")


def dotted(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's values by dotted name, as on a command line: {"method": {"name": "ring"}} gives method.name=ring. A
    list becomes JSON."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= dotted(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return flat
