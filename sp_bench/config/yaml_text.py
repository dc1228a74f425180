"""The one reader of YAML. No rank imports it."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import yaml

from sp_bench.config.parsing import ConfigError, shown
from sp_bench.config.prose import Prose

MAX_DEPTH = 50
MAX_NODES = 100_000  # with each alias counted as what it stands for: a short text could take minutes
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Words that YAML 1.1 reads as something else than what they look like: 12:00:00 is 43200, 0123 is 83, no is false
_MISREAD = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?|[-+]?0[0-7_]+|(?i:yes|no|on|off)")


def read_yaml(text: str, name: Prose, load: Callable[[str], Any] = yaml.safe_load) -> Any:
    """The content of a YAML text.

    name: the file's, for errors. load: what reads the text; it raises yaml.YAMLError or ValueError.

    Raises:
        ConfigError: the text is not YAML, has a word that YAML takes for another value, or is far larger read than
            written; the message has the file, the line and the problem.
    """
    try:
        with suppress(yaml.YAMLError):  # `load` says what is not YAML
            _check(text, name)
        return load(text)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}," if error.problem_mark else ""
        raise ConfigError(f"{name}{line} is not YAML: {shown(error.problem)}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{name} cannot be read: {shown(reason)}") from None


def _check(text: str, name: Prose) -> None:
    anchors: dict[str, int] = {}  # nodes of each anchored node
    open_nodes: list[tuple[str | None, int]] = []  # of each collection that is open: its anchor, the count before it
    count = 0
    for event in yaml.parse(text, _LOADER):
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _MISREAD.fullmatch(event.value):
            value = yaml.safe_load(event.value)
            raise ConfigError(
                f"{name}, line {event.start_mark.line + 1}: YAML reads {shown(event.value)} as {value!r}; quote it for "
                "the text, or write the number or true or false"
            )
        if isinstance(event, yaml.AliasEvent) and any(event.anchor == anchor for anchor, _ in open_nodes):
            raise ConfigError(f"{name}, line {event.start_mark.line + 1}: *{shown(event.anchor)} stands inside itself")
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor:
                anchors[anchor] = count - before
        count += anchors.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if count > MAX_NODES or len(open_nodes) > MAX_DEPTH:
            raise ConfigError(
                f"{name}, line {event.start_mark.line + 1}: more than {MAX_NODES:,} values with aliases written out, "
                f"or nested deeper than {MAX_DEPTH}"
            )
