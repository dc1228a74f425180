"""report, archive, compare: results from the rows of campaigns."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sp_bench.cli.options import (
    FAILED,
    SHOWN,
    AsJson,
    LinkFile,
    given_options,
    named_campaigns,
    require_together,
    write_link,
)
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.driver.progress import console, working

_TABLES = frozenset({"--smallest", "--anonymous", "--mix", "only."})
_DRAWINGS = _TABLES | {"--out", "--column", "--height", "--venue"}
TAKES = {  # what a report writes instead of the page -> the options that count there
    "--only": _DRAWINGS,
    "--line": _DRAWINGS - {"--smallest"},
    "--export": _TABLES,
    "--findings": _TABLES,
    "--explore": frozenset({"--smallest", "--anonymous"}),
    "--history": frozenset({"only."}),
    "--render": frozenset(),
    "--link": frozenset(),
}


def report(
    context: typer.Context,
    folders: Annotated[
        list[Path], typer.Argument(help="Campaign folders, such as results/smoke; and only.FIELD=VALUES, as in run")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; default: _work/report of the first campaign")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="FIGURE", help="This figure and no page; a wrong name lists them all")
    ] = None,
    line: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:FIELD=VALUES", help="A line of Figure 1 and Table 1, by its cells; write these, no page"
        ),
    ] = None,
    column: Annotated[int, typer.Option(min=1, max=2, help="Figures as wide as one column of a paper, or two")] = 2,
    height: Annotated[float | None, typer.Option(min=0.5, metavar="INCHES", help="Height of every figure")] = None,
    venue: Annotated[
        str | None, typer.Option(metavar="NAME", help="Widths and fonts of neurips, icml, iclr, mlsys, acm or ieee")
    ] = None,
    smallest: Annotated[
        float, typer.Option(min=0, max=1, help="Smallest effect of interest: differences below it are ties")
    ] = 0.02,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Leave out reasons, hosts, users, UUIDs, paths, addresses and commits")
    ] = False,
    mix: Annotated[bool, typer.Option("--mix", help="Pool rows of different environments; the page says so")] = False,
    export: Annotated[
        str | None, typer.Option(metavar="csv|json", help="Print the tables of all settings so; write no page")
    ] = None,
    findings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what the rows say, as Markdown, there; write no page")
    ] = None,
    render: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.jinja", help="Fill this template, or those of a folder, from the rows; write no page"
        ),
    ] = None,
    explore: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write one page with pickers over all these campaigns; no other page"),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Print each cell that ran in several campaigns, by time; write no page")
    ] = False,
    link: LinkFile = None,
) -> None:
    """Make a page, figures and tables from the rows of campaigns.

    sp-bench report results/smoke

    Put two campaigns on one page. Rows of different environments (core_id: libraries, device, shared code) have
    separate lines, unless --mix pools them:

        sp-bench report results/monday results/tuesday --out page

    Draw one figure as wide as a column of a paper, anonymously:

        sp-bench report results/h200 --only ratios --column 1 --venue icml --anonymous --out paper

    Make Figure 1 and Table 1 of a paper: chosen cells of several campaigns, in your order and words, with times over
    those of the first line, and captions that name the options in which lines differ:

        sp-bench report results/h200x4_step_methods_3 results/h200x4_step_methods_4 --line "Ulysses: method=ulysses"
        --line "ring: method=ring" --venue icml --out paper

    Print the table of all cells, or write the findings of all campaigns as Markdown:

        sp-bench report results/h200 --export csv > h200.csv

        sp-bench report results/* --findings docs/RESULTS.md

    Fill README.md and docs/ from the rows:

        sp-bench report results/* --render . --render docs

    Explore all campaigns on one page, which opens offline:

        sp-bench report results/* --explore explorer.html

    Show the ring over all campaigns by time, with each median over the one before:

        sp-bench report results/* --history only.method=ring only.sp_size=4

    Make a link of your own from rows of workload=collective, as `run --link` does:

        sp-bench report results/ours --link conf/link/ours.yaml

    It writes index.html, which needs no other file; figures/*.pdf and png, each with its data as csv and a tex file
    that includes it with its caption; and tables.tex, md, csv, json. With --only it writes that figure alone. A later
    report removes files that it no longer makes. Exit codes: 0 written, 2 bad input.
    """
    from sp_bench import report as reports
    from sp_bench.planning.overrides import ONLY

    for option, value, known in (("--venue", venue, reports.VENUES), ("--export", export, ("csv", "json"))):
        if value is not None and value not in known:
            raise ConfigError(f"{option} {value} is not known; use one of {', '.join(known)}")
    if unknown := set(only or ()) - set(reports.NAMES):
        raise ConfigError(f"--only {' '.join(sorted(unknown))} is no figure; use one of {', '.join(reports.NAMES)}")
    of_rows = [str(path) for path in folders if str(path).startswith(ONLY)]
    require_together({*given_options(context), *([ONLY] if of_rows else [])}, TAKES)
    folders = named_campaigns([path for path in folders if not str(path).startswith(ONLY)])
    rows, lines = _words([word.removeprefix(ONLY) for word in of_rows], ONLY), [_line(text) for text in line or ()]
    if render:
        _render(folders, render)
        return
    if link is not None:
        write_link(folders, link)
        return
    if explore is not None:
        _explore(folders, explore, smallest, anonymous)
        return
    if history:
        _show_history(folders, rows)
        return
    options = reports.Options(reports.Look(column, height, venue), tuple(only or ()), smallest, anonymous, mix, rows)
    _make(folders, out, options, lines, export, findings)


def _make(
    folders: Sequence[Path],
    out: Path | None,
    options: Any,
    lines: Sequence[tuple[str, dict[str, list[Any]]]],
    export: str | None,
    findings: Path | None,
) -> None:
    """Make the page, or instead the figure of `lines`, the exported tables or the findings."""
    from sp_bench import report as reports
    from sp_bench.cli.processes import processes
    from sp_bench.report import paper
    from sp_bench.rows import store

    target = reports.default_out(folders) if out is None else out
    if not export and not findings and (obstacle := reports.obstacle(target, folders)):
        raise ConfigError(f"{'the report, without --out:' if out is None else '--out'} {shown(target)} {obstacle}")
    empty = [folder for folder in folders if next(store.committed(folder), None) is None]
    if len(empty) == len(folders):
        raise ConfigError(
            f"{', '.join(map(shown, empty))}: no rows, and so no report; name folders that a run wrote to"
        )
    try:
        with working() as say, processes(folders) as executor:
            exported, built = "", None
            if lines:
                paper.write(folders, target, lines, options, executor)
            elif export:
                exported = reports.export(folders, export, options, executor)
            elif findings:
                reports.write_findings(folders, findings, options, executor)
            else:
                built = reports.build(folders, target, options, executor=executor, say=say)
    except OSError as error:
        raise ConfigError(f"no report in {shown(findings or target)}: {shown(error)}") from error
    if built is None:
        print(exported or (f"figure and table: {target}\n" if lines else f"findings: {findings}\n"), end="")
        return
    for folder in empty:
        print(f"{shown(folder)}: no rows")
    for problem in built.problems[:SHOWN]:
        print(problem)
    if more := built.problems[SHOWN:]:
        print(f"{len(more):,} further files are named on the page")
    print(f"report: {built.page}")


def _words(lines: Sequence[str], before: str) -> dict[str, list[Any]]:
    """Option -> values, by the grammar of `run`."""
    from sp_bench.planning.overrides import parse_overrides, refuse_repeated, values

    parsed = parse_overrides(lines, before)
    refuse_repeated(parsed, before)
    return {each.key_or_group: values(each) for each in parsed}


def _line(text: str) -> tuple[str, dict[str, list[Any]]]:
    name, colon, words = text.partition(":")
    if not colon:
        raise ConfigError(f"--line {shown(text)}: give NAME:FIELD=VALUES, such as --line 'ring: method=ring'")
    return name.strip(), _words(words.split(), f"--line {name}: ")


def _render(folders: Sequence[Path], templates: Sequence[Path]) -> None:
    from sp_bench.cli.documents import HELPERS
    from sp_bench.cli.processes import processes
    from sp_bench.report import templates as documents

    try:
        with processes(folders) as executor:
            for document in documents.render(templates, folders, executor, HELPERS):
                print(f"written: {document}")
    except OSError as error:
        raise ConfigError(f"--render: {shown(error)}") from error


def _show_history(folders: Sequence[Path], rows: dict[str, list[Any]]) -> None:
    from sp_bench.cli.processes import processes
    from sp_bench.report import history

    with working() as say, processes(folders) as executor:
        say("reading campaigns")
        found = history.history(folders, rows, executor)
    history.show(found, console())
    if not found:
        print("no cell ran in several of these campaigns; `sp-bench compare` says in what the nearest differ")


def _explore(folders: Sequence[Path], file: Path, smallest: float, hide_names: bool) -> None:
    from sp_bench.cli.processes import processes
    from sp_bench.report import explorer

    if file.suffix != ".html" or not file.parent.is_dir():
        raise ConfigError(f"--explore {shown(file)}: name a file that ends with .html, in a folder that there is")
    try:
        with working() as say, processes(folders) as executor:
            html, skipped = explorer.page(folders, smallest, hide_names=hide_names, executor=executor, say=say)
        file.write_text(html, "utf-8")
    except OSError as error:
        raise ConfigError(f"no explorer in {shown(file)}: {shown(error)}") from error
    print("\n".join([*skipped, f"explorer: {file}"]))


def archive(
    folders: Annotated[list[Path], typer.Argument(help="Campaign folders, such as results/night")],
    out: Annotated[Path, typer.Option(metavar="FILE.zip", help="Where the archive is written")],
    anonymous: Annotated[bool, typer.Option("--anonymous", help="The report without hosts, users and paths")] = False,
) -> None:
    """Make the artifact of a paper: rows, plans, proofs, environment, report and checksums of campaigns in one zip.

    sp-bench archive results/night --out night.zip

    Equal rows give equal bytes. Rows are copied as they are, so old ones may have values of environment variables that
    rows now have as hashes. With --anonymous the report and the rows are anonymous, and plans and proofs are left out.
    Exit codes: 0 written, 2 bad input or an unreadable row.
    """
    from sp_bench import report as reports
    from sp_bench.cli.processes import processes
    from sp_bench.report import archive as archives

    folders = named_campaigns(folders)
    if out.suffix != ".zip":
        raise ConfigError(f"--out {shown(out)}: the archive is a zip; give it a name that ends so")
    try:
        with working() as say, processes(folders) as executor:
            options = reports.Options(anonymous=anonymous)
            number = archives.write(folders, out, options, executor=executor, say=say)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no archive in {shown(out)}: {shown(error)}") from error
    print(f"archive: {out}, {number:,} files")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Campaign folder to compare with")],
    others: Annotated[
        list[Path], typer.Argument(metavar="B...", help="Campaign folders that may have become slower, each against A")
    ],
    fail_on: Annotated[
        str | None, typer.Option(metavar="median:NUMBER%", help="Exit with 1 if a cell became slower by more")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Cells may differ in it, as workload.warmup_steps; may be repeated"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare campaigns cell by cell: ratios of step times, changed statuses, cells that only one side has.

    sp-bench compare results/before results/after

    sp-bench compare results/monday results/tuesday results/wednesday --ignore workload.timed_steps

    sp-bench compare results/before results/after --fail-on median:5%

    A cell fails if B over A is above the bound and, with 6 replicates or more on both sides, the interval of the ratio
    excludes 1. It also fails if more of its replicates failed in B than in A, or if a row of B cannot be read. Exit
    codes: 0 nothing fails, 1 something fails, 2 bad input.
    """
    from sp_bench.analysis import comparison
    from sp_bench.cli.processes import processes
    from sp_bench.formats import counted
    from sp_bench.report.comparison_table import show as show_comparison
    from sp_bench.rows.store import require_campaigns

    try:
        bound = None if fail_on is None else comparison.fail_bound(fail_on)
        folder_a, *folders_b = folders = require_campaigns([a, *others])
        with working() as say, processes(folders) as executor:
            say("reading campaigns")
            all_compared = [comparison.compare(folder_a, each, executor, ignore or []) for each in folders_b]
    except comparison.NotComparable as error:
        raise ConfigError(str(error)) from None
    if as_json:
        made = [compared.as_json() for compared in all_compared]
        print(json.dumps(made[0] if len(made) == 1 else made, indent=1))
    else:
        for number, compared in enumerate(all_compared):
            print("\n" * bool(number), end="")
            show_comparison(compared, console())
    if bound is None or not (worse := [line for each in all_compared for line in each.regressions(bound)]):
        return
    print(f"sp-bench: worse than --fail-on {fail_on} allows: {counted(len(worse), 'finding')}", file=sys.stderr)
    for line in worse:
        print(f"  {line}", file=sys.stderr)
    raise typer.Exit(FAILED)
