"""What the runs of a campaign planned: one small JSON file for each set of trials and searches, beside the rows. So a
report can say what is missing. A run of the same trials and searches writes the same file again."""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sp_bench.rows import plain_file

FOLDER = "_plans"  # in the campaign's folder; readers of rows pass over names that begin so


@dataclass(frozen=True)
class PlannedTrial:
    trial_id: str
    env_id: str
    method: str


@dataclass(frozen=True)
class Plan:
    started: float  # when the last run of these trials began, s since 1970
    trials: frozenset[PlannedTrial]
    searches: Mapping[str, bool] = field(default_factory=dict)  # for the longest sequence: name -> whether it has ended
    probes: frozenset[str] = frozenset()  # trial_ids of what the searches tried, or found in rows
    brackets: Mapping[str, str] = field(default_factory=dict)  # search -> between which lengths the edge is, in words


def write(
    folder: Path,
    trials: Iterable[PlannedTrial],
    searches: Mapping[str, bool] | None = None,
    probes: Iterable[str] = (),
    brackets: Mapping[str, str] | None = None,
) -> None:
    """Say in a campaign's folder which trials the run has that begins now.

    searches: name -> whether it has ended. probes: trial_ids of what they tried so far, or are about to. brackets:
    search -> what is known of the edge, in words. Probes and brackets that an earlier run of the same trials and
    searches wrote stay: a run that is killed early must not forget what the rows were for.

    Raises:
        OSError: it cannot be written.
    """
    by_method: dict[str, list[tuple[str, str]]] = {}
    for trial in trials:
        by_method.setdefault(trial.method, []).append((trial.trial_id, trial.env_id))
    planned = {method: sorted(ids) for method, ids in sorted(by_method.items())}
    searches = dict(searches or {})
    asked = [planned, *searches] if searches else planned
    name = f"{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]}.json"
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    temporary = place / f".{name}.{os.getpid()}"
    tried, known = {*probes}, dict(brackets or {})
    for plan in _plans([place / name]):
        tried, known = tried | plan.probes, {**plan.brackets, **known}
    content = {"started": time.time(), "trials": planned, "searches": searches}
    temporary.write_text(json.dumps({**content, "probes": sorted(tried), "brackets": known}))
    os.replace(temporary, place / name)


def read(folder: Path) -> list[Plan]:
    """A campaign's plans, the one that was run last at the end. Empty if no run wrote one, or if it is damaged."""
    return sorted(_plans((folder / FOLDER).glob("[!.]*.json")), key=lambda plan: plan.started)


def open_searches(found: Sequence[Plan]) -> dict[str, str]:
    """The searches for the longest sequence that have ended in none of these plans: name -> the bracket so far, in
    words; empty: nothing was tried."""
    searches = [search for plan in found for search in plan.searches.items()]
    ended = {name for name, has_ended in searches if has_ended}
    brackets = {name: bracket for plan in found for name, bracket in plan.brackets.items()}
    return {name: brackets.get(name, "") for name, _ in searches if name not in ended}


def _plans(paths: Iterable[Path]) -> Iterator[Plan]:
    for path in paths:
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            content = plain_file.json_of(path)
            trials = frozenset(
                PlannedTrial(str(trial_id), str(env_id), str(method))
                for method, ids in content["trials"].items()
                for trial_id, env_id in ids
            )
            searches = {str(name): bool(ended) for name, ended in content.get("searches", {}).items()}
            brackets = {str(name): str(bracket) for name, bracket in content.get("brackets", {}).items()}
            probes = frozenset(map(str, content.get("probes", ())))
            yield Plan(float(content["started"]), trials, searches, probes, brackets)
