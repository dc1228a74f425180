"""What a file of conf/cluster says: how jobs are asked for on one cluster.

Its values become directives of a batch script, so each is checked: no text can end its directive and begin another.
"""

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from sp_bench.config.parsing import ConfigError, nearest, shown
from sp_bench.driver import overrides

GROUP = "cluster"
PLACE = "{gpus}"  # in `gres`: how many GPUs a job asks for
_DIRECTIVE = re.compile(
    r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:;&|*()\[\]{}+=@/-]*"
)  # no blank, no quote, no #, no leading dash
_KINDS = {str: "text", int: "a whole number", bool: "true or false", tuple: "a list of texts"}


@dataclass(frozen=True)
class ClusterConfig:
    """One cluster. conf/cluster/slurm.yaml says what each field means."""

    name: str
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus_per_node: int = 8
    gres: str = f"gpu:{PLACE}"
    cpus_per_task: int | None = None
    memory: str | None = None
    exclusive: bool = False
    time_limit_minutes: int = 1440
    setup: tuple[str, ...] = ()
    container: tuple[str, ...] = ()
    sp_bench: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("account", "partition", "qos", "constraint", "gres", "memory"):
            if (value := getattr(self, field)) is not None and not _DIRECTIVE.fullmatch(value):
                raise ConfigError(
                    f"{field}: {shown(repr(value))} cannot stand in a batch script: use letters, digits and "
                    "_.,:;&|*()[]+=@/-, without blanks and not beginning with a dash"
                )
        if PLACE not in self.gres:
            raise ConfigError(f"gres: {self.gres} does not say how many: write {PLACE} there, as in gpu:{PLACE}")
        for field, least in (("gpus_per_node", 0), ("cpus_per_task", 1), ("time_limit_minutes", 1)):
            if (value := getattr(self, field)) is not None and value < least:
                raise ConfigError(f"{field}: {value} is less than {least}; use more")
        for field in ("setup", "container", "sp_bench"):
            for text in getattr(self, field):
                if not text.strip() or not text.isprintable():
                    raise ConfigError(f"{field}: {shown(repr(text))} must be one line of printable text")
            if (texts := getattr(self, field)) and texts[0].startswith("-"):
                raise ConfigError(f"{field}: {shown(texts[0])} begins with a dash; a command begins with its name")

    @property
    def same_packages(self) -> bool:
        """Whether jobs run the Python that submits, and so measure with its packages."""
        return not self.container and not self.sp_bench


def read(name: str) -> ClusterConfig:
    """The cluster that a file of conf/cluster describes, ours or the user's.

    Raises:
        ConfigError: no such file, a file that is not YAML, an unknown key, or a value that no batch script can hold.
    """
    known = overrides.choices(GROUP)
    if name not in known:
        raise ConfigError(
            f"--cluster {shown(name)}: {nearest(name, known)}files of conf/cluster: {', '.join(known)}; yours go into "
            "./conf/cluster"
        )
    path = overrides.own_file(f"{GROUP}/{name}") or overrides.conf_folder() / GROUP / f"{name}.yaml"
    try:
        config = _config(_content(path))
        if config.name != name:
            raise ConfigError(f"name: {shown(config.name)} is not the file's own: write name: {name}")
    except ConfigError as error:
        raise ConfigError(f"{shown(path)}: {error}") from None
    return config


def _content(path: Path) -> Mapping[Any, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1} " if error.problem_mark else ""
        raise ConfigError(f"{line}is not YAML: {shown(error.problem)}") from None
    except (yaml.YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {shown(str(error).splitlines()[0])}") from None
    if not isinstance(content, Mapping):
        raise ConfigError("must map keys to values, such as partition: gpu")
    return content


def _config(content: Mapping[Any, Any]) -> ClusterConfig:
    hints = typing.get_type_hints(ClusterConfig)
    for key in content:
        if key not in hints:
            raise ConfigError(f"{shown(key)} is not a key; {nearest(key, hints)}keys: {', '.join(hints)}")
    if "name" not in content:
        raise ConfigError("has no name: write the file's own")
    found = {
        field.name: _value(field.name, hints[field.name], content[field.name])
        for field in fields(ClusterConfig)
        if field.name in content
    }
    return ClusterConfig(**found)


def _value(key: str, hint: Any, value: Any) -> Any:
    """The value as its field has it: a list of texts becomes a tuple."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = typing.get_origin(kinds[0]) or kinds[0]
    if value is None and types.NoneType in kinds:
        return None
    if kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if type(value) is not kind:
        hint_of_quotes = '; a number in quotes is text: "0"' if kind is str and type(value) is int else ""
        raise ConfigError(f"{key}: {shown(repr(value))} must be {_KINDS[kind]}{hint_of_quotes}")
    return value
