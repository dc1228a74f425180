"""Reports: rows in; one self-contained page, its figures and tables out. Imports rows, analysis, config, costs and
hardware, and nothing that runs a trial. No torch.

The data flow: selection (the rows that count) -> cells (replicates, summarised) -> settings (what is compared) ->
cards, figures, tables and page.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

from sp_bench.analysis.cells import Cell, cells, of_equal_steps
from sp_bench.analysis.chosen import Words, as_shown, matching
from sp_bench.analysis.grid import grid
from sp_bench.analysis.selection import Selection, select
from sp_bench.analysis.settings import SMALLEST
from sp_bench.analysis.settings import settings as settings
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.formats import counted
from sp_bench.report import folder, packed_gate, table
from sp_bench.report.anonymous import anonymous
from sp_bench.report.cards import cards
from sp_bench.report.caveats import caveats, missing, statuses
from sp_bench.report.figures import NAMES as NAMES
from sp_bench.report.figures import VENUES as VENUES
from sp_bench.report.figures import draw as draw
from sp_bench.report.figures.style import Look as Look
from sp_bench.report.findings import findings
from sp_bench.report.folder import PAGE
from sp_bench.report.folder import obstacle as obstacle
from sp_bench.report.page import Content, render
from sp_bench.report.setting_tables import VALUES, lines, tables
from sp_bench.rows import campaign_file, plans, store

MAX_BRACKET = 80  # characters of the bracket of a search

EXPORTS = {"csv": table.as_csv, "json": table.as_json}


@dataclass(frozen=True)
class Options:
    """The options of a report."""

    look: Look = field(default_factory=Look)
    only: Sequence[str] = ()  # draw these figures alone; empty: the page, all figures and the tables
    smallest: float = SMALLEST  # relative differences below this are ties
    anonymous: bool = False  # leave out what could identify the authors
    mix: bool = False  # pool rows of different environments in lines and medians
    rows: Words = field(default_factory=dict)  # show these cells alone


@dataclass(frozen=True)
class ReportResult:
    page: Path  # or the folder of figures, with Options.only
    problems: tuple[str, ...]  # one line for each skipped file
    num_unread: int = 0  # how many of the skipped files are named like rows


def default_out(folders: Sequence[Path]) -> Path:
    """The default output: _work/report of the first campaign."""
    return Path(folders[0]) / store.WORK / "report"


def read(folders: Sequence[Path], executor: Executor | None = None) -> list[Cell]:
    """The cells of campaigns as a report shows them; `settings` and `draw` take them.

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

    Files that only an earlier report had are removed: they may not match the rows.

    executor: processes that share the reading of rows. say: called with a line on each stage.

    Raises:
        OSError: a campaign cannot be read, or `out` cannot be written.
        ValueError: no folders, or no rows for the figures in `options.only`.
    """
    if not folders:
        raise ValueError("a report needs at least one campaign folder, such as results/smoke")
    options = options or Options()
    selection, known = measured(folders, options, executor, say)
    by_hand, unread = campaign_file.read_all([] if options.anonymous else folders)  # free text may name anybody
    selection = replace(selection, problems=(*selection.problems, *unread))
    found = settings(known, options.smallest)
    say(f"drawing {counted(len(known), 'cell')}")
    drawings = draw(found, known, options.look, options.only or NAMES)
    files = {f"figures/{d.stem}.{suffix}": data for d in drawings for suffix, data in d.files.items()}
    out = out or default_out(folders)
    if options.only:
        if not files:
            raise ConfigError(f"--only {' '.join(options.only)}: these rows have nothing to draw; name other figures")
        folder.write(out, files)
        return ReportResult(out / "figures", selection.problems, len(selection.unread))
    say("writing the tables and the page")
    made, gates = tables(found), packed_gate.gates(known)
    ran = [statuses(known)]
    if not options.anonymous:  # plans have names from outside
        ran += [missing(known, _planned(folders)), *_open_searches(folders)]
    named = [(folder.resolve().name, each) for folder, each in zip(folders, by_hand, strict=False)]
    ran += [f"{name} is superseded by {each.superseded_by}." for name, each in named if each.superseded_by]
    notes = [(f"{what} of {name}", text) for name, each in named for what, text in each.texts()]
    lines_of_page = cards(found), caveats(known, found, ran)
    answers = grid(found) if len(folders) > 1 else None
    content = Content(selection, known, *lines_of_page, drawings, made, gates, notes, answers)
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
    _, known = measured(folders, options, executor)
    return EXPORTS[kind](VALUES, lines(tables(settings(known, options.smallest))))


def records(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """The lines of the tables as values: what `--export` prints."""
    return table.records(VALUES, lines(tables(settings(cells))))


def write_findings(
    folders: Sequence[Path], path: Path, options: Options | None = None, executor: Executor | None = None
) -> None:
    """Write the tables of docs/RESULTS.md for some campaigns.

    Raises:
        OSError: a campaign cannot be read, or the file cannot be written.
    """
    options = options or Options()
    _, known = measured(folders, options, executor)
    path.write_text(findings(settings(known, options.smallest), known), "utf-8")


def _planned(folders: Sequence[Path]) -> dict[str, str] | None:
    """trial_id -> method of all planned trials; None if a campaign has no plan."""
    found = [plans.read(folder) for folder in folders]
    if not all(found):
        return None
    return {trial.trial_id: trial.method for each in found for plan in each for trial in plan.trials}


def _open_searches(folders: Sequence[Path]) -> list[str]:
    """A sentence on unfinished searches, with their brackets: too wide or not confirmed."""
    begun = [bracket for folder in folders for bracket in plans.open_searches(plans.read(folder)).values()]
    known = [shown(bracket, MAX_BRACKET) for bracket in begun if bracket]
    if not begun:
        return []
    number = "One search" if len(begun) == 1 else f"{len(begun)} searches"
    unknown = f"{len(begun) - len(known)} without a bracket" if len(known) < len(begun) else ""
    return [f"{number} for the longest sequence did not end: {'; '.join(filter(None, [*known, unknown]))}."]


def measured(
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
    words = as_shown(options.rows, selection.campaigns)
    return selection, matching(cells(of_equal_steps(selection.rows)), words, "only.")
