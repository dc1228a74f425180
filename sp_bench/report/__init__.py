"""Reports: rows in, one self-contained page, its figures and tables out. Knows rows, and what explains them: config,
costs, hardware. Nothing that runs a trial.

selection -> the rows that count, and which may be pooled; cells -> their replicates, summarised; figures, tables and
page -> what a reader sees. No torch.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from sp_bench.report import folder
from sp_bench.report.anonymous import anonymous
from sp_bench.report.cells import Cell, cells
from sp_bench.report.figures import begin
from sp_bench.report.figures import draw as draw
from sp_bench.report.figures.drawings import Drawing
from sp_bench.report.folder import PAGE
from sp_bench.report.folder import obstacle as obstacle
from sp_bench.report.formats import counted
from sp_bench.report.page import render
from sp_bench.report.page.sections import sections
from sp_bench.report.page.verdict import judge
from sp_bench.report.processes import processes as processes
from sp_bench.report.selection import Selection, select
from sp_bench.report.tables import paper_tables
from sp_bench.report.tables.latex import latex
from sp_bench.report.tables.markdown import markdown
from sp_bench.report.tables.parts import PaperTable
from sp_bench.report.tables.sheet import sheet
from sp_bench.rows import store

FIGURES, TABLES = "figures", "tables"


@dataclass(frozen=True)
class Options:
    """How a report is made; its rows say everything else."""

    venue: str | None = None  # figures are as wide as its text; None: as the page
    anonymous: bool = False  # without what could tell whose rows they are
    mix: bool = False  # rows of different environments share lines and medians


@dataclass(frozen=True)
class ReportResult:
    page: Path
    problems: tuple[str, ...]  # one line for each file that was passed over
    num_unread: int = 0  # of them, those named as rows are


def default_out(folders: Sequence[Path]) -> Path:
    """Where a report is written unless told: among what the first campaign holds beside its rows."""
    return Path(folders[0]) / store.WORK / "report"


def read(folders: Sequence[Path]) -> list[Cell]:
    """The cells of campaigns, as a report shows them: what `draw` and `paper_tables` take.

    Raises:
        OSError: a campaign cannot be read.
    """
    return cells(select(folders).rows)


def build(
    folders: Sequence[Path],
    out: Path | None = None,
    options: Options | None = None,
    *,
    executor: Executor | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> ReportResult:
    """Write the page, figures and tables of some campaigns into `out`, by default _work/report of the first campaign.

    Files of an earlier report that this one no longer has are removed, so that none lies beside rows it is not of.
    `executor`: processes that share the reading of rows and the drawing. `say` hears what is being done.

    Raises:
        OSError: a campaign cannot be read, or `out` cannot be written.
        ValueError: no folders, or no such venue.
    """
    if not folders:
        raise ValueError("a report needs at least one campaign folder, such as results/smoke")
    options = options or Options()
    selection = _select(folders, options, executor, say)
    say(f"summarising {counted(len(selection.rows), 'row')}")
    measured = cells(selection.rows)
    say(f"drawing {counted(len(measured), 'cell')}")
    finished = begin(measured, options.venue, executor)
    tables, verdict, parts = paper_tables(measured), judge(measured, selection), sections(measured)
    files = _table_files(tables)  # all this while the processes draw
    drawings, undrawn = finished()
    say("writing the tables and the page")
    page = render(selection, measured, verdict, drawings, undrawn, parts, tables)
    out = out or default_out(folders)
    folder.write(out, _figure_files(drawings) | files | {PAGE: page.encode()})
    return ReportResult(out / PAGE, selection.problems, len(selection.unread))


def _select(
    folders: Sequence[Path], options: Options, executor: Executor | None, say: Callable[[str], None]
) -> Selection:
    num_read = 0

    def progress(more: int) -> None:
        nonlocal num_read
        num_read += more
        say(f"reading rows: {num_read:,}")

    selection = select(folders, mix=options.mix, executor=executor, progress=progress)
    return anonymous(selection, folders) if options.anonymous else selection


def _figure_files(drawings: Sequence[Drawing]) -> dict[str, bytes]:
    """Path in the report's folder -> content."""
    return {f"{FIGURES}/{d.stem}.{suffix}": content for d in drawings for suffix, content in d.files.items()}


def _table_files(tables: Sequence[PaperTable]) -> dict[str, bytes]:
    made: dict[str, bytes] = {}
    for table in tables:
        texts = {"tex": latex(table), "md": markdown(table), "csv": sheet(table)}
        made |= {f"{TABLES}/{table.stem}.{suffix}": text.encode() for suffix, text in texts.items()}
    return made
