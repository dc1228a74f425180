"""Reports: rows in, one self-contained page, its figures and tables out. Knows rows, and what explains them: config,
costs, hardware. Nothing that runs a trial.

selection -> the rows that count, and which may be pooled; cells -> their replicates, summarised; settings -> what they
answer; cards, figures, tables and page -> what a reader sees. No torch.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

from sp_bench.analysis.cells import Cell, cells, of_equal_steps
from sp_bench.analysis.selection import Selection, select
from sp_bench.analysis.settings import SMALLEST
from sp_bench.analysis.settings import settings as settings
from sp_bench.config.parsing import ConfigError
from sp_bench.formats import counted
from sp_bench.report import folder, packed_gate, table
from sp_bench.report.anonymous import anonymous
from sp_bench.report.cards import cards, caveats, missing, statuses
from sp_bench.report.figures import NAMES as NAMES
from sp_bench.report.figures import VENUES as VENUES
from sp_bench.report.figures import draw as draw
from sp_bench.report.figures.style import Look as Look
from sp_bench.report.findings import findings
from sp_bench.report.folder import PAGE
from sp_bench.report.folder import obstacle as obstacle
from sp_bench.report.page import Content, render
from sp_bench.report.processes import processes as processes
from sp_bench.report.setting_tables import VALUES, lines, tables
from sp_bench.rows import campaign_file, plans, store

EXPORTS = {"csv": table.as_csv, "json": table.as_json}


@dataclass(frozen=True)
class Options:
    """How a report is made; its rows say everything else."""

    look: Look = field(default_factory=Look)
    only: Sequence[str] = ()  # figures, and nothing else; empty: the page, all figures and the tables
    smallest: float = SMALLEST  # differences below this share are none
    anonymous: bool = False  # without what could tell whose rows they are
    mix: bool = False  # rows of different environments share lines and medians


@dataclass(frozen=True)
class ReportResult:
    page: Path  # or the folder of figures, where nothing else was asked for
    problems: tuple[str, ...]  # one line for each file that was passed over
    num_unread: int = 0  # of them, those named as rows are


def default_out(folders: Sequence[Path]) -> Path:
    """Where a report is written unless told: among what the first campaign holds beside its rows."""
    return Path(folders[0]) / store.WORK / "report"


def read(folders: Sequence[Path], executor: Executor | None = None) -> list[Cell]:
    """The cells of campaigns, as a report shows them: what `settings` and `draw` take.

    Raises:
        OSError: a campaign cannot be read.
    """
    return cells(of_equal_steps(select(folders, executor=executor).rows))


def build(
    folders: Sequence[Path],
    out: Path | None = None,
    options: Options | None = None,
    *,
    executor: Executor | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> ReportResult:
    """Write the page, figures and tables of some campaigns, or the figures of `options.only` alone, into `out`, by
    default _work/report of the first campaign.

    Files of an earlier report that this one no longer has are removed, so that none lies beside rows it is not of.
    `executor`: processes that share the reading of rows. `say` hears what is being done.

    Raises:
        OSError: a campaign cannot be read, or `out` cannot be written.
        ValueError: no folders, or nothing to draw of the figures that were asked for.
    """
    if not folders:
        raise ValueError("a report needs at least one campaign folder, such as results/smoke")
    options = options or Options()
    selection, measured = _measured(folders, options, executor, say)
    by_hand, unread = campaign_file.read_all([] if options.anonymous else folders)  # free text may name anybody
    selection = replace(selection, problems=(*selection.problems, *unread))
    found = settings(measured, options.smallest)
    say(f"drawing {counted(len(measured), 'cell')}")
    drawings = draw(found, measured, options.look, options.only or NAMES)
    files = {f"figures/{d.stem}.{suffix}": data for d in drawings for suffix, data in d.files.items()}
    out = out or default_out(folders)
    if options.only:
        if not files:
            raise ConfigError(f"--only {' '.join(options.only)}: these rows have nothing to draw; name other figures")
        folder.write(out, files)
        return ReportResult(out / "figures", selection.problems, len(selection.unread))
    say("writing the tables and the page")
    made, gates = tables(found), packed_gate.gates(measured)
    ran = [statuses(measured)]
    if not options.anonymous:  # plans have names from outside
        ran += [missing(measured, _planned(folders)), *_open_searches(folders)]
    named = [(folder.resolve().name, each) for folder, each in zip(folders, by_hand, strict=False)]
    ran += [f"{name} is superseded by {each.superseded_by}." for name, each in named if each.superseded_by]
    notes = [(f"{what} of {name}", text) for name, each in named for what, text in each.texts()]
    content = Content(selection, measured, cards(found), caveats(measured, found, ran), drawings, made, gates, notes)
    texts = {kind: as_text(VALUES, lines(made)) for kind, as_text in EXPORTS.items()}
    texts["md"] = "\n".join(filter(None, [packed_gate.markdown(gates), table.markdown(made)]))
    texts["tex"] = table.latex([*made, *gates])
    files |= {f"tables.{suffix}": text.encode() for suffix, text in texts.items()}
    folder.write(out, files | {PAGE: render(content).encode()})
    return ReportResult(out / PAGE, selection.problems, len(selection.unread))


def export(folders: Sequence[Path], kind: str, options: Options | None = None, executor: Executor | None = None) -> str:
    """The tables of all settings as text, csv or json.

    Raises:
        OSError: a campaign cannot be read.
    """
    options = options or Options()
    _, measured = _measured(folders, options, executor)
    return EXPORTS[kind](VALUES, lines(tables(settings(measured, options.smallest))))


def records(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """The lines of the tables as values: what `--export` prints."""
    return table.records(VALUES, lines(tables(settings(cells))))


def write_findings(
    folders: Sequence[Path], path: Path, options: Options | None = None, executor: Executor | None = None
) -> None:
    """Write what the rows of campaigns say into a Markdown file.

    Raises:
        OSError: a campaign cannot be read, or the file cannot be written.
    """
    options = options or Options()
    _, measured = _measured(folders, options, executor)
    path.write_text(findings(settings(measured, options.smallest), measured), "utf-8")


def _planned(folders: Sequence[Path]) -> dict[str, str] | None:
    """trial_id -> method of all that was planned; None: of a campaign that is not known."""
    found = [plans.read(folder) for folder in folders]
    if not all(found):
        return None
    return {trial.trial_id: trial.method for each in found for plan in each for trial in plan.trials}


def _open_searches(folders: Sequence[Path]) -> list[str]:
    """A sentence on searches that did not end, whose brackets are wider than they would be, or not confirmed."""
    begun = [search for folder in folders for search in plans.open_searches(plans.read(folder)).items()]
    found = [f"{name}, so far {bracket}" if bracket else name for name, bracket in begun]
    if not found:
        return []
    number = "One search" if len(found) == 1 else f"{len(found)} searches"
    return [f"{number} for the longest sequence did not end: {'; '.join(found)}."]


def _measured(
    folders: Sequence[Path],
    options: Options,
    executor: Executor | None,
    say: Callable[[str], None] = lambda words: None,
) -> tuple[Selection, list[Cell]]:
    num_read = 0

    def progress(more: int) -> None:
        nonlocal num_read
        num_read += more
        say(f"reading rows: {num_read:,}")

    selection = select(folders, mix=options.mix, executor=executor, progress=progress)
    selection = anonymous(selection) if options.anonymous else selection
    say(f"summarising {counted(len(selection.rows), 'row')}")
    return selection, cells(of_equal_steps(selection.rows))
