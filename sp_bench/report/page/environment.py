"""What was measured, on what, by which code: distinct values over the rows of the page."""

from collections import Counter
from typing import Any

import pandas as pd

from sp_bench.report.cells import listed
from sp_bench.report.device_sets import several
from sp_bench.report.formats import MISSING
from sp_bench.report.selection import Selection

NAMED = ("hostname", "cpu", "cpu_cores", "driver", "cuda", "cudnn", "nccl", "process_group", "python", "topology")


def environment(selection: Selection) -> list[tuple[str, str]]:
    """(what, its values over the rows). More than one value of a thing is shown as such."""
    rows = selection.rows
    environments = [e for e in rows["environment"] if isinstance(e, dict)]
    statuses = ", ".join(f"{n:,} {status}" for status, n in Counter(map(str, rows["status"])).most_common())
    started = rows["started_at"].dropna()
    facts = [
        ("campaigns", _values(rows["folder"])),
        ("rows", f"{selection.num_read:,} read, {len(rows):,} used ({statuses or 'none'})"),
        ("core_id", selection.core_id or MISSING),
        (
            "started",
            f"{started.min():%Y-%m-%d %H:%M} to {started.max():%Y-%m-%d %H:%M} UTC" if len(started) else MISSING,
        ),
        ("git", _values(_commit(sha, dirty) for sha, dirty in zip(rows["git_sha"], rows["git_dirty"], strict=True))),
        ("schema", _values(rows["schema_version"])),
    ]
    facts += [(name.replace("_", " "), _values(e.get(name) for e in environments)) for name in NAMED]
    devices = (_values(_multiset(e.get("device_names")) for e in environments), several(rows["device_set"].dropna()))
    facts.append(("devices", "; ".join(filter(None, devices))))
    for name, column in (("libraries", "packages"), ("variables", "env")):
        pairs = (f"{key} {value}" for e in environments for key, value in listed(e.get(column)))
        facts.append((name, _values(pairs)))
    return [(name, value) for name, value in facts if value]


def _values(values: Any) -> str:
    """Distinct known values in order; empty without any."""
    known = (value for value in values if value is not None and value is not pd.NA)
    # a whole number beside missing ones comes as a float
    return ", ".join(sorted({f"{value:g}" if isinstance(value, float) else str(value) for value in known}))


def _commit(sha: Any, dirty: Any) -> str | None:
    if not isinstance(sha, str):
        return None
    return f"{sha[:12]} with uncommitted changes" if dirty is True else sha[:12]


def _multiset(names: Any) -> str | None:
    present = Counter(str(name) for name in listed(names))
    return " + ".join(f"{n} x {name}" for name, n in sorted(present.items())) or None
