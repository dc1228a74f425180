"""What was asked for, as values, and which of them tell trials or cells apart that would have one name.

Terminal and report share this and make words of it, each its own.
"""

import hashlib
import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from sp_bench.config.options import BY_PATH, OPTIONS, Option, as_overridden
from sp_bench.config.parsing import dotted
from sp_bench.config.trial import TrialConfig

OWN_CODE = "sp_bench"  # the implementation of our own methods

Key = TypeVar("Key", bound=Hashable)
Values = Mapping[str, Any]  # path of an option, as it is overridden -> its value


def cell_id(config: str) -> str:
    """12 hex digits of a config's stored text."""
    return _digest(config)


def trial_id(cell: str, replicate: int) -> str:
    return _digest(f"{cell}/{replicate}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def config_values(config: TrialConfig) -> dict[str, Any]:
    """The value of each option by its path; variables of a fabric by their own."""
    values = {option.path: option.value(config) for option in OPTIONS}
    return dotted({path: BY_PATH[path].old_rows if value is None else value for path, value in values.items()})


def option_values(row: Values, options: Sequence[Option] = OPTIONS) -> dict[str, Any]:
    """What a row says was asked for: the value of each of these options by its path, and whatever else its config has.

    The column wins over the config, which has what older rows have no column for. For options that came later the
    config wins, because reading filled their column.
    """
    leaves = config_leaves(row["config"])
    values = {name: value for name, value in leaves.items() if name not in BY_PATH}
    for option in options:
        if not option.of or row["workload"] in option.of:
            given = leaves.get(option.path)
            if given is None and option.name == "name":
                given = leaves.get(option.group)  # the group of an old config can be its name
            written = None if option.column is None else row[option.column]
            found = (written, given) if option.old_rows is None else (given, written)
            values[option.path] = next((value for value in found if value is not None), option.none_means)
        else:
            values[option.path] = None
    if library(row["implementation"]) is not None:
        values["method.dkv_dtype"] = None  # no option of a library's, and old rows do not say it
    return values


def pack_seed(options: Values) -> int | None:
    """The seed where documents are drawn from it: with another one the work is another. None where they are not."""
    return options.get("seed") if options.get("workload.packing") == "lognormal" else None


def config_leaves(config: Any) -> dict[str, Any]:
    """The config's values by dotted name; empty if the row has no readable config."""
    try:
        tree = json.loads(config)
        return dotted(tree) if isinstance(tree, dict) else {}
    except (TypeError, ValueError, RecursionError):  # the last of a config that is nested deeper than Python calls
        return {}


def as_asked(config: Any, ignore: Collection[str] = ()) -> str:
    """The config as text, without options at their default, which rows from before the option lack, and without those
    in `ignore`. Empty if the row has no readable config."""
    leaves = config_leaves(config)
    leaves = {path: value for path, value in leaves.items() if value is not None and path not in ignore}
    means = {path: BY_PATH[path].none_means if path in BY_PATH else None for path in leaves}
    known = {path: value for path, value in leaves.items() if value != means[path]}
    return json.dumps(known, sort_keys=True) if known else ""


def library(implementation: str | None) -> tuple[str, str] | None:
    """Name and version of a library whose code a row ran, as its column `implementation` has them: name==version.

    The version is empty if unknown. None: our own code, or no code."""
    if implementation in (None, OWN_CODE):
        return None
    name, _, version = implementation.partition("==")
    return name, version


def short_name(path: str) -> str:
    """The column's name of an option, or its own; of a method's own option, its name."""
    option = BY_PATH.get(path)
    return as_overridden(path).removeprefix("method.") if option is None else option.column or option.name


def group_of(path: str) -> str:
    """The first part of a dotted name: fabric of fabric.env.NCCL_ALGO."""
    return path.partition(".")[0] if "." in path else ""


def tell_apart(
    names: Sequence[Hashable], values: Sequence[Values], paths: Sequence[str], within: Sequence[Hashable] = ()
) -> list[list[tuple[str, Any]]]:
    """The options, with values, that distinguish each item from others of the same name. Options are added in the order
    of `paths` until all names differ.

    within: the place of each item. Names must differ only within a place, but all items of one name get the same
    options, so that an item has the same name in every place.
    """
    places = within or [None] * len(names)
    distinguishing: list[list[tuple[str, Any]]] = [[] for _ in names]
    for path in paths:
        so_far = [(name, *each) for name, each in zip(names, distinguishing, strict=True)]
        several = mixed(list(zip(places, so_far, strict=True)), [each.get(path) for each in values])
        ambiguous = {name for _, name in several}
        for options, name, each in zip(distinguishing, so_far, values, strict=True):
            if name in ambiguous:
                options.append((path, each.get(path)))
    return distinguishing


def mixed(keys: Sequence[Key], values: Sequence[Any]) -> set[Key]:
    """The keys that have several values; a missing one is a value too."""
    found: dict[Key, set[Any]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, set()).add(value)
    return {key for key, each in found.items() if len(each) > 1}
