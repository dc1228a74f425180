"""Shows one trial: its rows, the reason of the last one's status, the ends of its logs, and how to repeat it alone."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sp_bench import methods
from sp_bench.config.options import as_overridden
from sp_bench.config.parsing import ConfigError, parse, shown
from sp_bench.config.trial import TrialConfig
from sp_bench.planning import overrides, sweep
from sp_bench.planning.plan import cell_id
from sp_bench.rows import store
from sp_bench.rows.names import config_values
from sp_bench.rows.packed import PACK
from sp_bench.rows.store import RowName

SHORTEST = 4  # fewest characters of an abbreviated trial_id
LOG_LINES = 20  # of each rank
MAX_VALUE = 300  # characters of a column
REPEATED = "campaign=repeated"  # a campaign of its own: the repeated row joins no other rows

Found = tuple[Path, RowName]  # campaign and row


def find(trial: str, campaigns: Sequence[Path]) -> list[Found]:
    """The rows of the trial whose trial_id begins with `trial`, the oldest file first.

    Raises:
        ConfigError: no trial matches, or several do.
    """
    if not re.fullmatch(rf"[0-9a-f]{{{SHORTEST},12}}", trial):
        raise ConfigError(
            f"{shown(trial)} is no trial_id: give its 12 hex digits, or {SHORTEST} and more of them; `sp-bench export "
            "FOLDER` and the page's appendix list them"
        )
    found = [(folder, row) for folder in campaigns for row in store.committed(folder) if row.trial_id.startswith(trial)]
    if not found:
        raise ConfigError(
            f"no row of a trial {trial} in {_listed(campaigns)}; name the campaign's folder after it: sp-bench show "
            f"{trial} FOLDER"
        )
    if several := sorted({row.trial_id for _, row in found} - {found[0][1].trial_id}):
        raise ConfigError(f"{trial} begins several trial_ids: {found[0][1].trial_id}, {', '.join(several[:5])}")
    return sorted(found, key=lambda each: (_written_at(*each), each[1].attempt))


def _written_at(folder: Path, name: RowName) -> int:
    """The time of the row's file, or of the pack that holds the row."""
    path = folder / name.file_name
    return (path if path.exists() else folder / PACK).stat().st_mtime_ns


def _listed(campaigns: Sequence[Path]) -> str:
    names = [shown(folder) for folder in campaigns]
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "results/"


def row_of(found: Found) -> dict[str, Any]:
    """All columns of the row.

    Raises:
        ConfigError: it cannot be read.
    """
    folder, name = found
    rows, problems = store.read(folder, names=[name.file_name])
    if not rows.num_rows:
        raise ConfigError(problems[0])
    return rows.to_pylist()[0]


def lines(found: Sequence[Found]) -> list[str]:
    """The lines to print for a trial: its attempts, then all columns of the last one."""
    last = found[-1]
    row = row_of(last)
    printed = [f"{shown(folder)}: attempt {name.attempt} in {name.env_id}: {name.status}" for folder, name in found]
    printed += ["", *_columns(row), "", f"repeat it alone: {repeat(row['config'])}"]
    for log in logs(*last):
        printed += ["", f"{shown(log)}, its last lines:", *(f"  {line}" for line in _tail(log))]
    return printed


def _columns(row: dict[str, Any]) -> list[str]:
    """A line per column that is not null. Long values are cut, except the reason."""
    width = max(map(len, row))
    return [
        f"{name:{width}}  {shown(value, 10_000 if name == 'reason' else MAX_VALUE)}"
        for name, value in row.items()
        if value is not None
    ]


def logs(folder: Path, name: RowName) -> list[Path]:
    """The existing logs of an attempt's ranks."""
    attempt = f"{name.trial_id}-{name.env_id}-{name.attempt}"
    return sorted((folder / store.WORK / "trials").glob(f"{attempt}.*/rank*.log"))


def _tail(log: Path) -> list[str]:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 16384))
        text = file.read().decode(errors="replace")
    return [shown(line) for line in text.splitlines()[-LOG_LINES:]] or ["(empty)"]


def repeat(config: str | None) -> str:
    """The command line that runs a row's cell once, in its own campaign; or why there is none. A row does not say
    where the file of a method from outside was: it is looked for in the current folder."""
    try:
        overrides.use_config_dirs([])
        wanted = parse(TrialConfig, json.loads(config or "null") or {})
        chosen = [_choice(group, getattr(wanted, group).name) for group in overrides.GROUPS]
        (default,), _ = sweep.configs(overrides.read_arguments(chosen))
        ours, theirs = config_values(default), config_values(wanted)
        more = [
            f"{as_overridden(path)}={_literal(value)}"
            for path, value in theirs.items()
            if value != ours.get(path) and not path.endswith(".name")
        ]
        (again,), _ = sweep.configs(overrides.read_arguments([*chosen, *more]))
    except ConfigError as error:
        return f"not with the files of conf and the methods that are here: {error}"
    differs = "" if cell_id(again) == cell_id(wanted) else "  # not the same cell: a file of conf has changed since"
    return f"sp-bench run {shlex.join([*chosen, *more, REPEATED])}{differs}"


def _choice(group: str, name: str) -> str:
    is_file = group == "method" and name not in methods.names()
    return f"{overrides.METHOD_PATH}={name}.py" if is_file else f"{group}={name}"


def _literal(value: Any) -> str:
    return sweep.override_line("", value)[1:] if not isinstance(value, str) else sweep.override_line("", [value])[1:]
