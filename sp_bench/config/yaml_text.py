"""The one reader of YAML. No rank imports it."""

from collections.abc import Callable
from typing import Any

import yaml

from sp_bench.config.parsing import ConfigError, shown
from sp_bench.config.prose import Prose


def read_yaml(text: str, name: Prose, load: Callable[[str], Any] = yaml.safe_load) -> Any:
    """The content of a YAML text.

    name: the file's, for errors. load: what reads the text; it raises yaml.YAMLError or ValueError.

    Raises:
        ConfigError: the text is not YAML; the message has the file, the line and the problem.
    """
    try:
        return load(text)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}," if error.problem_mark else ""
        raise ConfigError(f"{name}{line} is not YAML: {shown(error.problem)}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{name} cannot be read: {shown(reason)}") from None
