"""Where cells come from, in one sentence: `compare` prints it for each side."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sp_bench.analysis.cells import Cell, listed
from sp_bench.analysis.device_sets import several
from sp_bench.analysis.ratios import MIN_REPLICATES
from sp_bench.formats import counted
from sp_bench.rows import git
from sp_bench.rows.names import OWN_CODE, library

ALWAYS = ("torch",)  # libraries that are always named; others only if a kernel, method or process group is theirs


def origin(cells: Sequence[Cell]) -> str:
    """Campaigns, rows, replicates a cell, estimator, interval, git, hardware, libraries and core_id of these cells.
    Unknown parts are left out. Empty without cells."""
    if not cells:
        return ""
    rows = [row for cell in cells for row in cell.rows]
    parts = [
        f"{_listing(row['folder'] for row in rows)}: {_rows(rows)}, {_replicates(cells)}",
        _estimator(cells),
        _flags(cells),
        _unsampled(cells),
        _git(rows),
        _hardware(rows),
        _libraries(cells),
        f"core_id {_listing(row['core_id'] for row in rows)}",
        mixing(cells),
    ]
    return f"{'; '.join(part for part in parts if part)}."


def mixing(cells: Sequence[Cell]) -> str:
    """A warning that --mix pooled rows of several environments; empty if it did not."""
    core_ids = sorted({core_id for cell in cells if not cell.pool for core_id in cell.core_ids})
    if len(core_ids) < 2:
        return ""
    pooled = "lines, medians and paired ratios pool them; each pair is of one"
    return f"rows of {len(core_ids)} core_ids are mixed (--mix): {pooled}"


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    statuses = Counter(str(row["status"]) for row in rows)
    total = counted(len(rows), "row")
    if set(statuses) == {"ok"}:
        return total
    return f"{total} ({', '.join(f'{n:,} {status}' for status, n in statuses.most_common())})"


def _replicates(cells: Sequence[Cell]) -> str:
    numbers = sorted({len(cell.step_ms) for cell in cells if cell.ok})
    if not numbers:
        return "none measured"
    spread = counted(numbers[-1], "replicate")
    return f"{spread if len(numbers) == 1 else f'{numbers[0]} to {spread}'} a cell"


def _estimator(cells: Sequence[Cell]) -> str:
    """The estimator of times and its interval; empty if nothing was measured."""
    measured = [cell for cell in cells if cell.ok]
    if not measured:
        return ""
    single = all(len(cell.step_ms) == 1 for cell in measured)
    estimator = "median over the timed steps" if single else "median over replicates of their median steps"
    coverages = sorted({f"{c.interval_ms.coverage:.1%}" for c in measured if c.interval_ms})
    if not coverages:
        return f"{estimator}, no interval {_none_where(measured)}"
    covered = coverages[0] if len(coverages) == 1 else f"{coverages[0]} to {coverages[-1]}"
    without = [cell for cell in measured if cell.interval_ms is None]
    interval = f"order-statistic intervals of coverage {covered}"
    return f"{estimator}, {interval}{f', none {_none_where(without)}' if without else ''}"


def _none_where(without: Sequence[Cell]) -> str:
    """Why cells have no interval."""
    enough = [len(cell.step_ms) >= MIN_REPLICATES for cell in without]
    below, apart = f"below {MIN_REPLICATES} replicates", "of replicates of several campaigns or machines"
    return f"{below} and {apart}" if any(enough) and not all(enough) else apart if any(enough) else below


def _flags(cells: Sequence[Cell]) -> str:
    """The number of cells with doubtful times, by flag: `flagged short_window: 3 of 9 cells`."""
    measured = [cell for cell in cells if cell.ok]
    found = Counter(flag for cell in measured for flag in cell.flags)
    parts = [f"{flag}: {number} of {counted(len(measured), 'cell')}" for flag, number in sorted(found.items())]
    return f"flagged {', '.join(parts)}" if parts else ""


def _unsampled(cells: Sequence[Cell]) -> str:
    """The number of rows from before gradients were checked at the timed length."""
    number = sum(cell.num_unsampled for cell in cells)
    return f"gradients unchecked at the timed length: {counted(number, 'row')}" if number else ""


def _git(rows: Sequence[Mapping[str, Any]]) -> str:
    commits = {
        f"{git.short(row['git_sha'])}{' with uncommitted changes' if row['git_dirty'] is True else ''}"
        for row in rows
        if isinstance(row["git_sha"], str)
    }
    return f"git {_listing(commits)}" if commits else ""


def _hardware(rows: Sequence[Mapping[str, Any]]) -> str:
    """`4 x NVIDIA H200`, or `1 to 4 x` if trials differ; the CPU if there are no devices."""
    used: dict[str, set[int]] = {}
    processors: set[str] = set()
    for environment in _environments(rows):
        devices = Counter(str(name) for name in listed(environment.get("device_names")))
        for name, number in devices.items():
            used.setdefault(name, set()).add(number)
        if not devices and environment.get("cpu") is not None:
            processors.add(f"{environment['cpu']} ({counted(int(environment.get('cpu_cores') or 0), 'core')})")
    parts = [f"{_spread(numbers)} x {name}" for name, numbers in sorted(used.items())]
    return ", ".join([*parts, *sorted(processors), *filter(None, (several(row["device_set"] for row in rows),))])


def _spread(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return f"{ordered[0]}" if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _libraries(cells: Sequence[Cell]) -> str:
    asked = {str(cell.asked[name]) for cell in cells for name in ("kernel", "method")}
    whose = (library(cell.asked["implementation"]) or (OWN_CODE,) for cell in cells)
    wanted = {*ALWAYS, *map(_plain, asked), *(_plain(name) for name, *_ in whose)}
    versions: dict[str, set[str]] = {}
    for environment in _environments([row for cell in cells for row in cell.rows]):
        packages = {str(name): version for name, version in listed(environment.get("packages"))}
        for name, version in packages.items():
            if _plain(name) in wanted and version is not None:
                versions.setdefault(name, set()).add(str(version))
        if "nccl" in str(environment.get("process_group")).lower() and environment.get("nccl"):
            versions.setdefault("NCCL", set()).add(str(environment["nccl"]))
        if "cudnn" in asked and (version := _version(packages, "nvidia-cudnn")):
            versions.setdefault("cuDNN", set()).add(version)
    order = sorted(versions, key=lambda name: (name not in ALWAYS, name.lower()))
    return ", ".join(f"{name} {' and '.join(sorted(versions[name]))}" for name in order)


def _version(packages: Mapping[str, Any], prefix: str) -> str | None:
    return next((str(version) for name, version in sorted(packages.items()) if name.startswith(prefix)), None)


def _environments(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row["environment"] for row in rows if isinstance(row["environment"], Mapping)]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _listing(values: Iterable[Any]) -> str:
    return ", ".join(sorted({str(value) for value in values if value is not None}))
