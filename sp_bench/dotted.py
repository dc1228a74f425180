"""A config's values by their dotted names, as they are overridden: {"method": {"name": "ring"}} is method.name=ring."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def dotted(config: Mapping[str, Any]) -> dict[str, Any]:
    """In the order of the config; a list as JSON."""
    return dict(_leaves(config, ""))


def _leaves(branch: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in branch.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, json.dumps(value) if isinstance(value, list) else value
