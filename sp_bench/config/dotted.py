"""A config's values by their dotted names, as they are overridden: {"method": {"name": "ring"}} is method.name=ring."""

import json
from collections.abc import Mapping
from typing import Any


def dotted(config: Mapping[str, Any]) -> dict[str, Any]:
    """A list as JSON. Without recursion: what a row of others says may be nested deeply."""
    flat: dict[str, Any] = {}
    branches = [("", config)]
    while branches:
        prefix, branch = branches.pop()
        for name, value in branch.items():
            if isinstance(value, dict):
                branches.append((f"{prefix}{name}.", value))
            else:
                flat[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return flat
