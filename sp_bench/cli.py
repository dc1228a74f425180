"""The console: `sp-bench run | resume | plan | report | compare | status | doctor | methods`."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sp_bench.config.parsing import ConfigError, shown
from sp_bench.driver.progress import console, working
from sp_bench.rows import store
from sp_bench.rows.store import require_campaigns

LONGEST = 4000  # characters of an error message
SHOWN = 20  # skipped files that are named
WORSE = 1  # exit code when --fail-on finds something
BAD_INPUT = 2  # exit code of what the user can put right
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.callback()
def describe() -> None:
    """Ulysses sequence parallelism or Ring Attention? Proven right first, then timed.

    A sweep becomes trials; each trial is one fresh multi-process job; each attempt leaves one parquet row.
    """


@app.command(context_settings=PASS_ON)
def run(context: typer.Context) -> None:
    """Run a sweep. Every trial that has no row yet gets one.

    Values with commas are swept; all combinations run:

        sp-bench run method=ulysses,ring sp_size=2,4 seq_len=4096,8192

    A sweep file of conf/sweep, with one field replaced in all of its blocks:

        sp-bench run sweep=smoke seq_len=1024

    A full training step, six replicates of each combination, with rows in results/night:

        sp-bench run workload=train_step method=ring,usp sp_size=4 replicates=6 campaign=night

    Names of a group may be globs, and numbers a range:

        sp-bench run "method=glob(ring*)" "seq_len=range(1024,8193,1024)"

    Show the config of one trial, and run nothing:

        sp-bench run method=usp sp_size=4 --cfg job

    A second run skips the trials that have rows; `resume` also retries those that failed by bad luck. Two runs at
    once, on one machine or on two that share the folder, share the trials. Exit codes: 0 all trials have rows, 2 bad
    input or a folder that cannot be written, 130 interrupted.
    """
    _run_sweep(context.args)


@app.command(context_settings=PASS_ON)
def resume(context: typer.Context) -> None:
    """Continue a sweep: run what has no row yet, and retry what ended as preempted, timeout or error.

    Give the words of the run that you continue:

        sp-bench resume sweep=smoke seq_len=1024

    Each call makes one attempt at such a trial, and each attempt has its own row. There are at most max_attempts=3,
    the first run included. A trial that is ok, oom or incorrect would end the same way, so it is not retried. An
    unsupported trial runs once the machine can run it. Exit codes: those of run.
    """
    _run_sweep([*context.args, "resume=true"])


@app.command(context_settings=PASS_ON)
def plan(context: typer.Context) -> None:
    """Show what `run` would do with the same words. Launch nothing and write nothing.

    sp-bench plan sweep=smoke

    sp-bench plan method=ulysses sp_size=2,3,4 model=llama3_8b
    """
    _run_sweep([*context.args, "plan_only=true"])


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Campaign folders, such as results/smoke")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; default: _work/report of the first campaign")
    ] = None,
    venue: Annotated[
        str | None, typer.Option(metavar="NAME", help="Draw for neurips, icml, iclr, mlsys, acm or ieee")
    ] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Leave out hosts, users, UUIDs, paths, addresses and commits")
    ] = False,
    mix: Annotated[bool, typer.Option("--mix", help="Pool rows of different environments; the page says so")] = False,
) -> None:
    """Make a page, figures and tables from the rows of campaigns.

    sp-bench report results/smoke

    Put two campaigns on one page. Rows of different environments (core_id: libraries, device, shared code) get
    figures and tables of their own; with --mix they share them:

        sp-bench report results/monday results/tuesday --out page

    Draw figures at the width and in the fonts of a paper, anonymously:

        sp-bench report results/h200 --venue neurips --anonymous --out paper

    It writes index.html, which needs no other file; figures/*.pdf, svg, png, and csv with the data of each; and
    tables/*.tex, md, csv. A second report removes what the first one wrote and is no longer true. Exit codes: 0
    written, 2 bad input.
    """
    from sp_bench import report as reports
    from sp_bench.report.figures.venues import VENUES

    if venue is not None and venue not in VENUES:
        raise ConfigError(f"--venue {venue} is not known; use one of {', '.join(VENUES)}")
    require_campaigns(folders)
    target = reports.default_out(folders) if out is None else out
    if obstacle := reports.obstacle(target, folders):
        raise ConfigError(f"{'the report, without --out:' if out is None else '--out'} {shown(target)} {obstacle}")
    empty = [folder for folder in folders if next(store.committed(folder), None) is None]
    if len(empty) == len(folders):
        raise ConfigError(
            f"{', '.join(map(shown, empty))}: no rows, and so no report; name folders that a run wrote to"
        )
    options = reports.Options(venue, anonymous, mix)
    try:
        with working() as say, reports.processes(folders) as executor:
            built = reports.build(folders, target, options, executor=executor, say=say)
    except OSError as error:
        raise ConfigError(f"no report in {shown(target)}: {shown(error)}") from error
    for folder in empty:
        print(f"{shown(folder)}: no rows")
    for problem in built.problems[:SHOWN]:
        print(problem)
    if more := built.problems[SHOWN:]:
        print(f"{len(more):,} further files are named on the page")
    print(f"report: {built.page}")


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Campaign folder to compare with")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Campaign folder that may have become slower")],
    fail_on: Annotated[
        str | None, typer.Option(metavar="median:NUMBER%", help="Exit with 1 if a cell became slower by more")
    ] = None,
) -> None:
    """Compare two campaigns cell by cell: ratios of step times, changed statuses, cells that only one side has.

    sp-bench compare results/before results/after

    sp-bench compare results/before results/after --fail-on median:5%

    A cell fails when B over A is above the bound; with 6 replicates or more on both sides, the interval of that ratio
    must exclude 1 as well. A cell also fails when more of its replicates failed in B than in A, or when a row of B
    cannot be read. Exit codes: 0 nothing fails, 1 something fails, 2 bad input.
    """
    from sp_bench import report as reports
    from sp_bench.report import comparison
    from sp_bench.report.comparison_table import show
    from sp_bench.report.formats import counted

    try:
        bound = None if fail_on is None else comparison.fail_bound(fail_on)
        folder_a, folder_b = folders = require_campaigns([a, b])
        with working() as say, reports.processes(folders) as executor:
            say("reading both campaigns")
            compared = comparison.compare(folder_a, folder_b, executor)
    except comparison.NotComparable as error:
        raise ConfigError(str(error)) from None
    show(compared, console())
    if bound is None or not (worse := compared.regressions(bound)):
        return
    print(f"sp-bench: worse than --fail-on {fail_on} allows: {counted(len(worse), 'finding')}", file=sys.stderr)
    for line in worse:
        print(f"  {line}", file=sys.stderr)
    raise typer.Exit(WORSE)


@app.command()
def status(folders: Annotated[list[Path], typer.Argument(help="Campaign folders, such as results/smoke")]) -> None:
    """Count a campaign's rows by environment and status, and name the files that are not rows. Reads file names only.

    sp-bench status results/smoke
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("campaign", "env_id", *store.STATUSES):
        table.add_column(heading, justify="left" if heading in ("campaign", "env_id") else "right")
    passed_over: list[str] = []
    for folder in require_campaigns(folders):
        name = Text(shown(folder.name))  # as it stands: [ ] would be markup
        latest = store.latest(store.committed(folder))
        counts = Counter((row.env_id, row.status) for row in latest.values())
        for env_id in sorted({env_id for env_id, _ in counts}):
            table.add_row(name, env_id, *(str(counts[env_id, status]) for status in store.STATUSES))
        if not latest:
            table.add_row(name, "no rows")
        passed_over += sorted(store.passed_over(folder))
    console().print(table)
    for line in passed_over[:SHOWN]:
        print(line)
    if more := passed_over[SHOWN:]:
        print(f"and {len(more):,} further files that are not rows")


@app.command(context_settings=PASS_ON)
def doctor(
    context: typer.Context,
    curves: Annotated[bool, typer.Option("--curves", help="Measure latency and bandwidth of each fabric")] = False,
) -> None:
    """Show what this machine has: devices, libraries, and which kernels and methods run here or why not.

    sp-bench doctor

    With --curves: measure how fast each fabric of this machine moves messages, for each primitive. This runs
    sweep=fabrics (over gloo without two GPUs) and takes the overrides of `run`. Each curve is a row in results/fabrics
    and is measured once:

        sp-bench doctor --curves

        sp-bench doctor --curves fabric=nvlink,shm sp_size=8 results_root=/data/results
    """
    from sp_bench.driver import campaign, overrides, sweep
    from sp_bench.driver import doctor as examination

    if not curves:
        if context.args:
            raise ConfigError(f"{shown(' '.join(context.args))}: doctor takes --curves, and overrides only with that")
        examination.show()
        return
    request = overrides.read_arguments(overrides.replaced(examination.fabrics_here(), context.args))
    configs, settings = sweep.configs(request)
    campaign.run(configs, settings, _Reporter())
    examination.show_curves(settings.folder)


@app.command()
def methods(
    write: Annotated[Path | None, typer.Option(help="Write the table into this file, between its two markers")] = None,
) -> None:
    """Show which method can split which heads over how many ranks, or why it cannot.

    sp-bench methods
    """
    from sp_bench.driver import methods_table

    methods_table.show()
    if write:
        methods_table.write_into(write)


class _Reporter:
    """Makes the reports of runs. The report draws with matplotlib, so it is imported only once rows are there."""

    def effort(self, folder: Path) -> str:
        from sp_bench.report.effort import effort

        rows, _ = store.read(folder, ("status", "duration_s", "phase_s"))
        return effort(rows.to_pylist()).summary()

    def build(self, folder: Path) -> Iterator[str]:
        from sp_bench import report

        built = report.build([folder])
        yield from built.problems
        if built.num_unread:
            yield "a row that cannot be read counts as done: move its file away, and a run measures that trial again"
        yield f"report: {built.page}"


def _run_sweep(arguments: Sequence[str]) -> None:
    """Compose the trials of these overrides and run them; with --cfg job, show the one config instead."""
    from sp_bench.driver import campaign, overrides, sweep

    request = overrides.read_arguments(arguments)
    if request.show_config:
        print(sweep.as_yaml(request), end="")
    else:
        campaign.run(*sweep.configs(request), _Reporter())


def main() -> None:
    """Console entry. Bad input ends in one line and exit code 2; a traceback is a bug of ours."""
    try:
        app()
    except ConfigError as error:
        print(f"sp-bench: {shown(error, LONGEST)}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
