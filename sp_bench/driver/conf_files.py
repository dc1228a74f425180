"""The files of conf: where they are, what they say, and that each goes by its own name."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sp_bench.config.parsing import ConfigError, shown

GROUPS = ("method", "kernel", "model", "workload", "engine", "fabric", "hardware", "sweep")


def conf_folder() -> Path:
    """The configuration: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir())


@cache
def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def conf_path(name: str) -> Path:
    return conf_folder() / f"{name}.yaml"


@cache
def conf_file(name: str) -> Mapping[str, Any]:
    """What a file of conf says, such as that of `fabric/gloo`; an empty one says nothing.

    Raises:
        ConfigError: it is not YAML, or not keys with values.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(conf_path(name)))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}," if error.problem_mark else ""
        raise ConfigError(f"conf/{name}.yaml{line} is not YAML: {shown(error.problem)}") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"conf/{name}.yaml cannot be read: {shown(reason)}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"conf/{name}.yaml must map keys to values; it is a list")
    return {str(key): value for key, value in content.items()}


def check_defaults() -> None:
    """Every run reads conf/config.yaml and the files that it chooses.

    Raises:
        ConfigError: one of them cannot be read, or gives a name that is not its own.
    """
    for entry in conf_file("config").get("defaults", []):
        for key, choice in entry.items() if isinstance(entry, Mapping) else ():
            group = str(key).removeprefix("override ")
            if choice in choices(group):  # some of Hydra's own are in its package
                check_file(group, choice)


def check_file(group: str, choice: str) -> None:
    """A chosen file can be read, and names itself as it is chosen.

    Raises:
        ConfigError: it cannot, or does not.
    """
    content = conf_file(f"{group}/{choice}")
    if group in GROUPS[:-1] and (name := content.get("name")) != choice:
        says = f"says name: {shown(name)}" if name is not None else "gives no name"
        raise ConfigError(f"conf/{group}/{choice}.yaml {says}; rows are labelled by it: write name: {choice}")
