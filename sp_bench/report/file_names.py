"""Names of the files beside a page: what a figure or table is of and, of several, the options that tell them apart."""

import re
from collections.abc import Sequence
from itertools import count

from sp_bench.report.series import option_words, shared_values
from sp_bench.rows.names import Values

MAX_STEM = 160  # characters of a file name before its number and suffix


def stems(named: Sequence[tuple[str, Values]]) -> list[str]:
    """Of each (what it is of, values of its setting) a plain name, no two equal: memory-train_step-micro_batches=8.

    Options that have one value in all of one name are left out, and what is equal even so is numbered from -2 on."""
    settings: dict[str, list[Values]] = {}
    for what, values in named:
        settings.setdefault(what, []).append(values)
    made: list[str] = []
    for what, values in named:
        shared = shared_values(settings[what])
        known = {name: value for name, value in values.items() if value is not None and name not in shared}
        apart = [option_words(name, value) for name, value in known.items()]
        stem = "-".join(filter(None, map(_plain, [what, *apart])))[:MAX_STEM]
        made.append(next(s for n in count(1) if (s := stem if n == 1 else f"{stem}-{n}") not in made))
    return made


def _plain(words: str) -> str:
    return re.sub(r"[^A-Za-z0-9=-]+", "_", words).strip("_")
