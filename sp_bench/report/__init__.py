"""Reports: rows in, one self-contained page and its figures out. Knows results (and costs), nothing else; no torch.

selection -> the rows of one environment; tables -> cells; verdict, figures, sections, html -> what a reader sees.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sp_bench import results
from sp_bench.report.cells import cells
from sp_bench.report.figures import draw
from sp_bench.report.page import render
from sp_bench.report.page.sections import sections
from sp_bench.report.page.verdict import judge
from sp_bench.report.selection import select

PAGE = "index.html"
KINDS = ("throughput", "memory", "communication", "attribution", "fabrics", "errors")  # a figure's file name begins so


@dataclass(frozen=True)
class ReportResult:
    page: Path
    problems: tuple[str, ...]  # one line for each file that was passed over


def build(folders: Sequence[Path], out: Path | None = None) -> ReportResult:
    """Write the page and the figures of some campaigns into `out`, by default _work/report of the first campaign.

    Figures of an earlier report that this one no longer has are removed, so that no file lies beside rows it is not of.

    Raises:
        OSError: a campaign cannot be read, or `out` cannot be written.
        ValueError: no folders.
    """
    if not folders:
        raise ValueError("a report needs at least one campaign folder, such as results/smoke")
    selection = select(folders)
    measured = cells(selection.rows)
    drawings, undrawn = draw(measured)
    about = sections(measured)
    page = render(selection, measured, judge(measured, selection), drawings, undrawn, about)
    drawings += [drawing for section in about for drawing in section.drawings]
    out = out or Path(folders[0]) / results.WORK / "report"
    out.mkdir(parents=True, exist_ok=True)
    for drawing in drawings:
        _replace(out / drawing.file_name, drawing.png)
    _replace(out / PAGE, page.encode())
    current = {drawing.file_name for drawing in drawings}
    for kind in KINDS:
        for stale in out.glob(f"{kind}-*.png"):
            if stale.name not in current:
                stale.unlink()
    return ReportResult(out / PAGE, selection.problems)


def _replace(path: Path, content: bytes) -> None:
    """Appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
