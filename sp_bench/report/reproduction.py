"""The appendix of an archive for those who measure it again: what ran, on what, how long it took, and how near equal
cells come."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import pandas as pd

from sp_bench.analysis.cells import listed
from sp_bench.formats import counted, number, without_escapes

ABOUT = """# To measure it again

environment.txt has the versions. `sp-bench compare rows/CAMPAIGN results/YOURS` then says of each cell whether it
changed. How much replicates of a cell differ says what to expect on one machine; two machines of one kind can differ by
more.
"""


def markdown(rows: pd.DataFrame, commands: Mapping[str, Sequence[str]]) -> str:
    """rows: as of `select`. commands: of each campaign; those of an anonymous one are not known."""
    return "\n".join(
        [ABOUT, *(_section(str(name), of, commands.get(str(name), ())) for name, of in rows.groupby("folder"))]
    )


def _section(name: str, rows: pd.DataFrame, commands: Sequence[str]) -> str:
    seconds = [each for each in rows["duration_s"] if not pd.isna(each)]
    lines = [
        *(f"    {without_escapes(' '.join(words.split()))}" for words in commands),
        *[""] * bool(commands),
        f"- Hardware: {_hardware(rows) or 'not known'}",
        f"- Time: {number(sum(seconds) / 60)} minutes in {counted(len(seconds), 'trial')}",
        f"- Tolerance: {_tolerance(rows)}",
    ]
    return "\n".join([f"## {name}", "", *lines, ""])


def _hardware(rows: pd.DataFrame) -> str:
    """The most devices of a row: 4 x NVIDIA H200."""
    devices = [listed(each.get("device_names")) for each in rows["environment"] if isinstance(each, Mapping)]
    most = Counter(max(devices, key=len, default=[]))
    return ", ".join(f"{times} x {device}" for device, times in sorted(most.items()))


def _tolerance(rows: pd.DataFrame) -> str:
    cells: dict[str, list[float]] = {}
    cell_ids = rows["cell_id"].fillna(rows["trial_id"])  # old rows have none
    for cell, code, status, ms in zip(cell_ids, rows["core_id"], rows["status"], rows["median_step_ms"], strict=True):
        if status == "ok" and not pd.isna(ms):
            cells.setdefault(f"{cell} {code}", []).append(ms)
    spans = [max(each) / min(each) - 1 for each in cells.values() if len(each) > 1]
    if not spans:
        return "each cell has one replicate, so none is known"
    middle = f"{median(spans):.1%} longer than the fastest in the median of {counted(len(spans), 'cell')}"
    return f"the slowest replicate takes {middle}, {max(spans):.1%} at most"
