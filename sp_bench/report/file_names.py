"""Names of the files beside a page: what a figure or table is of and, of several, what tells its setting apart."""

import re
from collections.abc import Sequence
from itertools import count

MAX_STEM = 160  # characters of a file name before its number and suffix


def stems(named: Sequence[tuple[str, str]]) -> list[str]:
    """Of each (what it is of, setting): plain words, no two equal. Settings are words between commas; those that all of
    one name share are left out, and what is equal even so is numbered from -2 on."""
    settings: dict[str, list[set[str]]] = {}
    for what, setting in named:
        settings.setdefault(what, []).append(set(_words(setting)))
    made: list[str] = []
    for what, setting in named:
        shared = set.intersection(*settings[what])
        apart = [word for word in _words(setting) if word not in shared]
        stem = "-".join(filter(None, map(_plain, [what, *apart])))[:MAX_STEM]
        made.append(next(s for n in count(1) if (s := stem if n == 1 else f"{stem}-{n}") not in made))
    return made


def _words(setting: str) -> list[str]:
    return [word for word in re.split(r"[:;,]\s+", setting) if word]


def _plain(words: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "_", words).strip("_")
