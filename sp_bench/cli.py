"""The console: `sp-bench` and a verb, which are the functions below."""

import errno
import inspect
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from sp_bench import __version__
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.driver.progress import console, working

LONGEST = 4000  # characters of an error message
SHOWN = 20  # skipped files that are named
FAILED = 1  # exit code when --fail-on finds something
FAILURES = "error,incorrect,timeout"  # what --fail-on finds unless told; oom and unsupported are results
BAD_INPUT = 2  # exit code of what the user can put right
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

FailOn = Annotated[
    str, typer.Option(metavar="STATUSES", help="Exit with 1 if the latest row of a trial has one of these; or none")
]
NoReport = Annotated[bool, typer.Option("--no-report", help="Leave the report as it is, which takes seconds to draw")]
LogTo = Annotated[
    str | None,
    typer.Option(metavar="LOGGER", help="Also tell wandb, mlflow or tensorboard of each row, as it is committed"),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs")]

ConfigDir = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER", help="With files of your own in sweep, model, hardware, fabric or cluster; may be repeated"
    ),
]

Pack = Annotated[
    tuple[Path, int] | None,
    typer.Option(metavar="FILE NUMBER", help="Only the trials of this pack of a submission, as its job gives it"),
]

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)


class WithKeys(TyperCommand):
    """A command whose help ends with the keys that it takes, from their declarations."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        print("\n".join(_keys()))


def _keys() -> Iterator[str]:
    from dataclasses import fields

    from sp_bench.config.options import OPTIONS
    from sp_bench.config.parsing import SCALARS
    from sp_bench.driver.settings import CampaignConfig, DeadlinesConfig

    settings = [
        field.name for field in fields(CampaignConfig) if field.name not in ("deadlines", "plan_only", "resume")
    ]
    groups = dict.fromkeys(option.group for option in OPTIONS if option.group)
    yield "Groups, each a folder of conf; a name that is not there is answered with all that are:"
    yield f"  {', '.join(groups)}; and sweep, for a file with a whole sweep"
    yield "What is measured; values with commas are swept:"
    for option in OPTIONS:
        if option.name != "name" and option.type in SCALARS:
            yield f"  {option.path:34} {option.doc}{f' ({option.unit})' if option.unit else ''}"
    yield "A part of the trials: only.FIELD=VALUES keeps those that have one of the values, such as only.sp_size=2,4"
    yield "How the campaign runs, one value each (conf/config.yaml says what they mean):"
    yield f"  {', '.join([*settings, *(f'deadlines.{field.name}' for field in fields(DeadlinesConfig))])}"


def _say_version(asked: bool) -> None:
    if asked:
        from sp_bench import hardware

        commit, dirty = hardware.git_state()
        code = f" ({commit[:12]}{', with uncommitted changes' if dirty else ''})" if commit else ""
        print(f"sp-bench {__version__}{code}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and the commit.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Ulysses sequence parallelism or Ring Attention? Checked first, then timed.

    A sweep becomes trials; each trial is one multi-process job; each attempt leaves one parquet row.
    """


@app.command(context_settings=PASS_ON, cls=WithKeys)
def run(
    context: typer.Context,
    fail_on: FailOn = FAILURES,
    no_report: NoReport = False,
    log_to: LogTo = None,
    config_dir: ConfigDir = None,
) -> None:
    """Run a sweep. Every trial that has no row yet gets one.

    Values with commas are swept; all combinations run:

        sp-bench run method=ulysses,ring sp_size=2,4 seq_len=4096,8192

    A sweep file of conf/sweep, with one field replaced in all of its blocks:

        sp-bench run sweep=smoke seq_len=1024

    A part of it: the trials that have one of the values of each `only.` field:

        sp-bench run sweep=smoke only.method=ulysses,ring only.sp_size=4

    A full training step, six replicates of each combination, with rows in results/night:

        sp-bench run workload=train_step method=ring,usp sp_size=4 replicates=6 campaign=night

    Names of a group may be globs, and numbers a range:

        sp-bench run "method=glob(ring*)" "seq_len=range(1024,8193,1024)"

    Show the config of one trial, and run nothing:

        sp-bench run method=usp sp_size=4 --cfg job

    A second run skips the trials that have rows; `resume` also retries those that failed by bad luck. Two runs at
    once, on one machine or on two that share the folder, share the trials. Exit codes: 0 all trials have rows, 1 the
    latest row of one is an error, incorrect or a timeout, 2 bad input or a folder that cannot be written, 130 after
    Ctrl-C, 143 after SIGTERM.
    """
    _run_sweep(context.args, config_dir, fail_on, no_report, log_to)


@app.command(context_settings=PASS_ON, cls=WithKeys)
def resume(
    context: typer.Context,
    fail_on: FailOn = FAILURES,
    no_report: NoReport = False,
    log_to: LogTo = None,
    config_dir: ConfigDir = None,
    pack: Pack = None,
) -> None:
    """Continue a sweep: run what has no row yet, and retry what ended as preempted, timeout or error.

    Give the words of the run that you continue:

        sp-bench resume sweep=smoke seq_len=1024

    Each call makes one attempt at such a trial, and each attempt has its own row. There are at most max_attempts=3,
    the first run included. A trial that is ok, oom or incorrect would end the same way, so it is not retried. An
    unsupported trial runs once the machine can run it. Exit codes: those of run.
    """
    _run_sweep([*context.args, "resume=true"], config_dir, fail_on, no_report, log_to, pack=pack)


@app.command(context_settings=PASS_ON, cls=WithKeys)
def submit(
    context: typer.Context,
    cluster: Annotated[str, typer.Option(metavar="NAME", help="A file of conf/cluster, such as slurm")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch scripts and submit nothing")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return once the jobs have ended")] = False,
    fail_on: FailOn = FAILURES,
    config_dir: ConfigDir = None,
) -> None:
    """Submit a sweep to Slurm: jobs that run what has no row yet, and retry what `resume` retries.

    Show the batch scripts, and submit nothing:

        sp-bench submit sweep=smoke --cluster slurm --dry-run

    Submit, with the words of a run, and come back when all jobs have ended:

        sp-bench submit method=ulysses,ring sp_size=8 hardware=h200 fabric=nvlink --cluster mine --wait

    The trials of a replicate that need equally many nodes and GPUs are one job, so that methods are compared on the
    same nodes; num_nodes=2 has trials over two. Each job is a `resume` on its first node. Submitted again, the same
    words submit what has no row and is in no job that waits or runs. conf/cluster/slurm.yaml says what a file of
    conf/cluster holds. Exit codes: 0
    submitted, 2 bad input or a refusal of Slurm's; with --wait those of run, and 1 if trials have no row.
    """
    from sp_bench.cluster import file as clusters
    from sp_bench.cluster import submission
    from sp_bench.driver import overrides, sweep

    failures = _statuses("--fail-on", fail_on)
    overrides.use_config_dirs(config_dir or [])
    request = overrides.read_arguments([*context.args, "resume=true"])
    if request.show_config:
        raise ConfigError("--cfg job shows one configuration; `sp-bench run` takes it")
    asked = clusters.read(cluster)
    configs, settings = sweep.configs(request)
    words = [*context.args, "--fail-on", fail_on]
    words += [word for folder in config_dir or [] for word in ("--config-dir", str(folder))]
    job_ids = submission.submit(configs, settings, asked, words, dry_run=dry_run)
    if wait and not dry_run:
        submission.wait(job_ids)
        _exit_if_failed(submission.statuses(configs, settings, asked), ["missing", *failures])


@app.command(context_settings=PASS_ON, cls=WithKeys)
def plan(
    context: typer.Context,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="What submit would do there: packs and GPU-hours too")
    ] = None,
    as_json: AsJson = False,
    config_dir: ConfigDir = None,
) -> None:
    """Show what `run` would do with the same words. Launch nothing and write nothing.

    sp-bench plan sweep=smoke

    sp-bench plan method=ulysses sp_size=2,3,4 model=llama3_8b

    Show what `submit` would do, on nodes as conf/cluster/slurm.yaml describes them:

        sp-bench plan sweep=smoke --cluster slurm
    """
    if cluster is not None:
        _plan_jobs(context.args, cluster, config_dir, as_json=as_json)
        return
    _run_sweep([*context.args, "plan_only=true"], config_dir, as_json=as_json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Campaign folders, such as results/smoke")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; default: _work/report of the first campaign")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="FIGURE", help="This figure and no page; a wrong name lists them all"),
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
) -> None:
    """Make a page, figures and tables from the rows of campaigns.

    sp-bench report results/smoke

    Put two campaigns on one page. Rows of different environments (core_id: libraries, device, shared code) keep lines
    of their own; with --mix they share them:

        sp-bench report results/monday results/tuesday --out page

    Draw one figure as wide as a column of a paper, anonymously:

        sp-bench report results/h200 --only ratios --column 1 --venue icml --anonymous --out paper

    Print the table of all cells, or write what the rows of all campaigns say:

        sp-bench report results/h200 --export csv > h200.csv

        sp-bench report results/* --findings docs/RESULTS.md

    It writes index.html, which needs no other file; figures/*.pdf, png, and csv with the data of each; and tables.tex,
    md, csv, json; with --only that figure alone. A second report removes what the first one wrote and is no longer
    true. Exit codes: 0 written, 2 bad input.
    """
    from sp_bench import report as reports
    from sp_bench.rows import store

    for option, value, known in (("--venue", venue, reports.VENUES), ("--export", export, ("csv", "json"))):
        if value is not None and value not in known:
            raise ConfigError(f"{option} {value} is not known; use one of {', '.join(known)}")
    if unknown := set(only or ()) - set(reports.NAMES):
        raise ConfigError(f"--only {' '.join(sorted(unknown))} is no figure; use one of {', '.join(reports.NAMES)}")
    folders = _campaigns(folders)
    look = reports.Look(column, height, venue)
    options = reports.Options(look, tuple(only or ()), smallest, anonymous, mix)
    target = reports.default_out(folders) if out is None else out
    if not export and not findings and (obstacle := reports.obstacle(target, folders)):
        raise ConfigError(f"{'the report, without --out:' if out is None else '--out'} {shown(target)} {obstacle}")
    empty = [folder for folder in folders if next(store.committed(folder), None) is None]
    if len(empty) == len(folders):
        raise ConfigError(
            f"{', '.join(map(shown, empty))}: no rows, and so no report; name folders that a run wrote to"
        )
    try:
        with working() as say, reports.processes(folders) as executor:
            exported, built = "", None
            if export:
                exported = reports.export(folders, export, options, executor)
            elif findings:
                reports.write_findings(folders, findings, options, executor)
            else:
                built = reports.build(folders, target, options, executor=executor, say=say)
    except OSError as error:
        raise ConfigError(f"no report in {shown(findings or target)}: {shown(error)}") from error
    if built is None:
        print(exported or f"findings: {findings}\n", end="")
        return
    for folder in empty:
        print(f"{shown(folder)}: no rows")
    for problem in built.problems[:SHOWN]:
        print(problem)
    if more := built.problems[SHOWN:]:
        print(f"{len(more):,} further files are named on the page")
    print(f"report: {built.page}")


@app.command()
def archive(
    folders: Annotated[list[Path], typer.Argument(help="Campaign folders, such as results/night")],
    out: Annotated[Path, typer.Option(metavar="FILE.zip", help="Where the archive is written")],
    anonymous: Annotated[bool, typer.Option("--anonymous", help="The report without hosts, users and paths")] = False,
) -> None:
    """Make the artifact of a paper: rows, plans, environment, report and checksums of campaigns in one zip.

    sp-bench archive results/night --out night.zip

    Equal rows give equal bytes. Rows go in as they are: with --anonymous they are left out, and the report alone is
    anonymous. Exit codes: 0 written, 2 bad input, or a row that cannot be read.
    """
    from sp_bench import report as reports
    from sp_bench.report import archive as archives

    folders = _campaigns(folders)
    if out.suffix != ".zip":
        raise ConfigError(f"--out {shown(out)}: the archive is a zip; give it a name that ends so")
    try:
        with working() as say, reports.processes(folders) as executor:
            options = reports.Options(anonymous=anonymous)
            number = archives.write(folders, out, options, executor=executor, say=say)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no archive in {shown(out)}: {shown(error)}") from error
    print(f"archive: {out}, {number:,} files")


@app.command()
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

    A cell fails when B over A is above the bound; with 6 replicates or more on both sides, the interval of that ratio
    must exclude 1 as well. A cell also fails when more of its replicates failed in B than in A, or when a row of B
    cannot be read. Exit codes: 0 nothing fails, 1 something fails, 2 bad input.
    """
    from sp_bench import report as reports
    from sp_bench.analysis import comparison
    from sp_bench.analysis.formats import counted
    from sp_bench.report.comparison_table import show as show_comparison
    from sp_bench.rows.store import require_campaigns

    try:
        bound = None if fail_on is None else comparison.fail_bound(fail_on)
        folder_a, *folders_b = folders = require_campaigns([a, *others])
        with working() as say, reports.processes(folders) as executor:
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


Rows = Annotated[
    list[Path] | None, typer.Argument(help="Campaign folders; default: all in results/", show_default=False)
]
Kernel = Annotated[str, typer.Option(help="Whose rows say how fast attention is")]
Hardware = Annotated[str, typer.Option(help="Whose rows say how fast it is; speeds of others are not predicted")]
Node = Annotated[int, typer.Option(min=1, help="GPUs of a node")]
Network = Annotated[float, typer.Option(min=0.1, metavar="GIB/S", help="Of one GPU to other nodes; 45: 400 Gbit/s")]
MemoryGib = Annotated[
    float | None, typer.Option(min=1, metavar="GIB", help="Of one GPU; default: that of the hardware's rows")
]


@app.command()
def project(
    folders: Rows = None,
    model: Annotated[str, typer.Option(help="A file of conf/model")] = "qwen3_8b",
    gpus: Annotated[str, typer.Option(metavar="N,N", help="Numbers of GPUs, powers of two")] = "8,64,512,4096",
    seq_len: Annotated[str, typer.Option(metavar="N,N", help="Lengths in tokens")] = "131072,1048576",
    recompute: Annotated[str, typer.Option(help="What is recomputed: full, selective, ..., or any")] = "full",
    kernel: Kernel = "cudnn",
    hardware: Hardware = "h200",
    gpus_per_node: Node = 8,
    network: Network = 45.0,
    memory: MemoryGib = None,
    decisions: Annotated[bool, typer.Option("--map", help="The fastest attention by heads, ranks and network")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict training steps that nobody has measured, and say how wrong such predictions were.

    sp-bench project --model qwen3_8b --gpus 8,64,512 --seq-len 131072,1048576

    A map of which method's attention is fastest:

        sp-bench project --map

    Rates are fitted to the rows of campaigns. Then rows are left out - the largest number of GPUs, the longest length,
    each slower fabric - and predicted: these errors are printed below each answer. Only options that training steps
    were measured with are offered, and each answer says on which cells it rests. Exit codes: 0 predicted, 2 bad input,
    or rows that are missing.
    """
    from sp_bench.predict import advice, projection

    known = advice.CHECKPOINTING
    if recompute != "any" and recompute not in known:
        raise ConfigError(f"--recompute {shown(recompute)}: use any, or one of {', '.join(known)}")
    fit = _fit(folders, hardware)
    try:
        found = []
        if decisions:
            print(advice.decision_map(fit, kernel, gpus_per_node))
            print(f"\nBold: ahead by more than {fit.band(False, 1):.0%}, the error to reckon with.")
            print(f"\n{advice.evidence_of_map(fit, kernel)}")
        else:
            for number in _numbers("--gpus", gpus):
                cluster = advice.Cluster(number, gpus_per_node, network, _memory_gib(fit, memory))
                for config in _steps(model, hardware, kernel, fit.fabric, seq_len):
                    kept = known if recompute == "any" else (recompute,)
                    try:
                        found += advice.best_of_each_method(advice.candidates(fit, config, cluster, kept))
                    except advice.NothingFits as error:
                        print(f"sp-bench: {error}", file=sys.stderr)
            if as_json:
                print(json.dumps([each.as_json() for each in found], indent=1))
                return
            print(advice.table(found))
    except projection.NotProjectable as error:
        raise ConfigError(str(error)) from None
    if found:
        print(f"\n{advice.evidence(found)}")
    print(f"\n{advice.errors(fit)}\n\n{advice.ASSUMPTIONS}")


@app.command()
def advise(
    model: Annotated[str, typer.Option(help="A file of conf/model")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs, a power of two")],
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a sequence")],
    folders: Rows = None,
    kernel: Kernel = "cudnn",
    hardware: Hardware = "h200",
    gpus_per_node: Node = 8,
    network: Network = 45.0,
    memory: MemoryGib = None,
    as_json: AsJson = False,
) -> None:
    """Say in five lines how to train a model on so many GPUs: method, memory, step time, runner-up, how to measure it.

    sp-bench advise --model qwen3_8b --gpus 16 --seq-len 262144

    Speeds are those of the rows of --hardware, whatever --memory a GPU has.
    `project` says how it is predicted, and how wrong that can be. Exit codes: 0 answered, 2 bad input, nothing that
    fits, or rows that are missing.
    """
    from sp_bench.predict import advice, projection

    _numbers("--gpus", str(gpus))
    fit = _fit(folders, hardware)
    cluster = advice.Cluster(gpus, gpus_per_node, network, _memory_gib(fit, memory))
    try:
        (config,) = _steps(model, hardware, kernel, fit.fabric, str(seq_len))
        found = advice.candidates(fit, config, cluster)
    except projection.NotProjectable as error:
        raise ConfigError(str(error)) from None
    if as_json:
        print(json.dumps([each.as_json() for each in advice.best_and_others(found)], indent=1))
    else:
        print("\n".join(advice.advice(found, cluster)))


def _fit(folders: Sequence[Path] | None, hardware: str) -> Any:
    """The rates that the rows of campaigns give."""
    from sp_bench import report as reports
    from sp_bench.look import show as showing
    from sp_bench.predict import projection

    campaigns = _campaigns(folders) if folders else showing.campaigns_of(Path("results"))
    try:
        with working() as say, reports.processes(campaigns) as executor:
            say("reading rows")
            return projection.fit(reports.read(campaigns, executor), hardware)
    except projection.NotProjectable as error:
        raise ConfigError(str(error)) from None


def _steps(model: str, hardware: str, kernel: str, fabric: str, seq_len: str) -> Sequence[Any]:
    """The training step of a model at each length, as the command line composes it."""
    from sp_bench.driver import overrides, sweep

    words = [f"model={model}", f"hardware={hardware}", f"kernel={kernel}", f"fabric={fabric}", f"seq_len={seq_len}"]
    words += ["workload=train_step", "workload.loss_tile_tokens=2048", "method=ulysses", "sp_size=2", "dtype=bfloat16"]
    configs, _ = sweep.configs(overrides.read_arguments(words))
    return configs


def _memory_gib(fit: Any, given: float | None) -> float:
    if (found := given or fit.memory_gib) is None:
        raise ConfigError("the rows do not say how much memory a device has; give --memory")
    return found


def _numbers(option: str, given: str) -> list[int]:
    """`8,64` -> both; powers of two, since ranks of a sequence are halves of halves of all GPUs."""
    found = [int(word) if word.isdecimal() and len(word) < 8 else 0 for word in given.split(",")]
    if wrong := [word for word, n in zip(given.split(","), found, strict=True) if n < 1 or n & (n - 1)]:
        raise ConfigError(f"{option} {shown(wrong[0]) or 'an empty number'}: use powers of two, such as 8,64,512")
    return found


@app.command()
def status(
    folders: Annotated[list[Path], typer.Argument(help="Campaign folders, such as results/smoke")],
    as_json: AsJson = False,
) -> None:
    """Show how far a campaign is: rows by status, what is planned and left, its jobs, who runs what, and why trials
    failed.

    sp-bench status results/smoke

    Of each trial the latest attempt counts, once for each env_id it was measured with: a hash of packages, device and
    measuring code, which differs from method to method. What is planned is what the run that began last has. Files that
    are not rows are named. squeue says which jobs of `submit` wait or run. With several campaigns, failures are counted
    and their reasons left out.
    """
    from sp_bench.look import status as state
    from sp_bench.rows import store

    found = [state.overview(folder, reasons=as_json or len(folders) == 1) for folder in _campaigns(folders)]
    if as_json:
        print(json.dumps([each.as_json() for each in found], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("campaign", *store.STATUSES, "env_ids"):
        table.add_column(heading, justify="left" if heading == "campaign" else "right")
    for each in found:
        name = Text(shown(each.campaign))  # as it stands: [ ] would be markup
        table.add_row(name, *map(str, each.counts.values()), str(each.env_ids))
    console().print(table)
    for each in found:
        for line in state.lines(each):
            print(line)
    passed_over = [line for each in found for line in each.passed_over]
    for line in passed_over[:SHOWN]:
        print(line)
    if more := passed_over[SHOWN:]:
        print(f"and {len(more):,} further files that are not rows")


@app.command()
def rm(
    folder: Annotated[Path, typer.Argument(metavar="CAMPAIGN", help="A campaign folder, such as results/smoke")],
    status_: Annotated[str, typer.Option("--status", metavar="STATUSES", help="Rows with one of these")] = "none",
    trial: Annotated[
        list[str] | None, typer.Option(help="Rows of the trial with this trial_id; may be repeated")
    ] = None,
    cell: Annotated[list[str] | None, typer.Option(help="Rows of the cell with this cell_id; may be repeated")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Move them; without it, only say which")] = False,
    force: Annotated[bool, typer.Option("--force", help="Rows that are ok as well")] = False,
) -> None:
    """Take rows out of a campaign, so that a run measures their trials again. Nothing is deleted: they move to
    _work/removed.

    Say which rows would be moved:

        sp-bench rm results/night --status unsupported,error

    Move them:

        sp-bench rm results/night --status unsupported,error --yes

    Rows of one trial, or of one cell with all its replicates, whatever their status:

        sp-bench rm results/night --trial 0a1b2c3d4e5f --yes --force

    Rows that are ok are left unless --force is given. Exit codes: 0 done, 2 bad input.
    """
    from sp_bench.analysis.formats import counted
    from sp_bench.rows import removed
    from sp_bench.rows.store import require_campaigns

    (campaign,) = require_campaigns([folder])
    rows = removed.chosen(campaign, _statuses("--status", status_), trial or [], cell or [])
    left = [row for row in rows if row.status == "ok" and not force]
    rows = [row for row in rows if row not in left]
    if left:
        print(
            f"{counted(len(left), 'row')} that {'is' if len(left) == 1 else 'are'} ok left; --force takes them as well"
        )
    for row in rows[:SHOWN]:
        print(row.file_name)
    if more := rows[SHOWN:]:
        print(f"and {len(more):,} further rows")
    if not rows:
        print("no such rows")
    elif yes:
        print(f"{counted(len(rows), 'row')} moved to {shown(removed.move(campaign, rows))}")
    else:
        print(f"{counted(len(rows), 'row')} would be moved; --yes moves them")


@app.command()
def export(
    folders: Annotated[list[Path], typer.Argument(metavar="CAMPAIGN", help="Campaign folders, such as results/smoke")],
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="csv | json")] = "csv",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write there instead of printing")] = None,
) -> None:
    """Print rows as CSV or JSON: one line a row, with the columns that are no lists.

        sp-bench export results/night --out night.csv

    `report --export` prints the tables of a report instead. Exit codes: 0 done, 2 bad input.
    """
    from sp_bench.rows import flat, store

    if form not in flat.FORMATS:
        raise ConfigError(f"--format {shown(form)}: unknown; use one of {', '.join(flat.FORMATS)}")
    tables = []
    for campaign in store.require_campaigns(folders):
        rows, problems = store.read(campaign, flat.FLAT)
        tables.append(rows)
        for line in problems:
            print(f"sp-bench: {campaign}: {line}", file=sys.stderr)
    text = flat.FORMATS[form](store.joined(tables))
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error


@app.command()
def pack(
    folders: Annotated[list[Path], typer.Argument(metavar="CAMPAIGN", help="Campaign folders, such as results/smoke")],
    undo: Annotated[bool, typer.Option("--undo", help="Make a file of each row again")] = False,
) -> None:
    """Put all rows of a campaign into one file, packed.parquet, which is many times smaller.

    sp-bench reads packed rows as it reads files: report, status, resume and all else go on as before. So do pandas,
    DuckDB and polars. New rows are files of their own until the campaign is packed again:

        sp-bench pack results/night

    The file is read back and compared before a row's own file is removed. While a run works in the campaign it is
    refused. `rm` takes rows that are files:

        sp-bench pack results/night --undo

    Exit codes: 0 done, 2 bad input, or a campaign that is in use.
    """
    from sp_bench.analysis.formats import counted, in_bytes
    from sp_bench.look.pack import pack, unpack
    from sp_bench.rows.store import require_campaigns

    for campaign in require_campaigns(folders):
        if undo:
            print(f"{campaign}: {counted(unpack(campaign), 'row')} unpacked")
            continue
        done = pack(campaign)
        for line in done.left:
            print(f"{campaign}: {line}")
        sizes = f"{in_bytes(done.bytes_before)}, now {in_bytes(done.bytes_after)}"
        print(f"{campaign}: {counted(done.num_rows, 'row')} packed; {sizes}")


@app.command()
def show(
    trial: Annotated[str, typer.Argument(metavar="TRIAL", help="A trial_id, or the beginning of one")],
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Campaign folders; default: all in results/", show_default=False)
    ] = None,
) -> None:
    """Show one trial: its rows, why it failed, the ends of its logs, and the command that repeats it alone.

    sp-bench show 0a1b2c3d4e5f

    sp-bench show 0a1b results/night

    The line of a failed trial names its trial_id. Exit codes: 0 shown, 2 no such trial.
    """
    from sp_bench.look import show as showing

    campaigns = _campaigns(folders) if folders else showing.campaigns_of(Path("results"))
    for line in showing.lines(showing.find(trial, campaigns)):
        print(line)


@app.command(context_settings=PASS_ON)
def doctor(
    context: typer.Context,
    curves: Annotated[bool, typer.Option("--curves", help="Measure latency and bandwidth of each fabric")] = False,
    as_json: AsJson = False,
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
    from sp_bench.look import doctor as examination

    if not curves:
        if context.args:
            raise ConfigError(f"{shown(' '.join(context.args))}: doctor takes --curves, and overrides only with that")
        if as_json:
            print(json.dumps(examination.examine(), indent=1))
        else:
            examination.show()
        return
    if as_json:
        raise ConfigError("--json shows what this machine has; curves are rows, which the report reads")
    overrides.use_config_dirs([])
    request = overrides.read_arguments(overrides.replaced(examination.fabrics_here(), context.args))
    configs, settings = sweep.configs(request)
    statuses = campaign.run(configs, settings, _Reporter())
    examination.show_curves(settings.folder)
    _exit_if_failed(statuses, FAILURES.split(","))


@app.command()
def methods(
    write: Annotated[Path | None, typer.Option(help="Write the table into this file, between its two markers")] = None,
    packed: Annotated[
        list[Path] | None,
        typer.Option(metavar="CAMPAIGN", help="Show who computes packed documents right, from these rows; repeatable"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which method can split which heads over how many ranks, or why it cannot.

    sp-bench methods

    Which of them compute packed documents right, after `sp-bench run sweep=cpu_packed_gate`:

        sp-bench methods --packed results/cpu_packed_gate
    """
    from sp_bench.look import methods_table

    if packed:
        if as_json:
            raise ConfigError("--json is for the table of heads and ranks; sp_bench.load reads rows")
        from sp_bench import report as reports
        from sp_bench.report import packed_gate

        gates = []
        for campaign in _campaigns(packed):
            of_campaign = packed_gate.gates(reports.read([campaign]))
            if not of_campaign:
                raise ConfigError(
                    f"{shown(campaign)} has no rows of packed documents; sp-bench run sweep=cpu_packed_gate"
                )
            gates += of_campaign
        text = packed_gate.markdown(gates)
        print(text, end="")
        if write:
            methods_table.write_between(write, packed_gate.BEGIN, packed_gate.END, text)
        return
    if as_json:
        print(json.dumps(methods_table.as_json(), indent=1))
    else:
        methods_table.show()
    if write:
        methods_table.write_into(write)


def _campaigns(named: Sequence[Path]) -> list[Path]:
    """The folders that were named. A plain file among several, as results/* names, is passed over with a line."""
    from sp_bench.rows.store import require_campaigns

    files = [path for path in named if path.is_file()] if len(named) > 1 else []
    folders = require_campaigns([path for path in named if path not in files])
    for path in files:
        print(f"sp-bench: {shown(path)} is not a folder of results; passed over", file=sys.stderr)
    return folders


class _Reporter:
    """Makes the reports of runs. The report draws with matplotlib, so it is imported only once rows are there."""

    def effort(self, folder: Path) -> str:
        from sp_bench.analysis.effort import effort
        from sp_bench.rows import store

        rows, _ = store.read(folder, ("status", "duration_s", "phase_s"))
        return effort(rows.to_pylist()).summary()

    def build(self, folder: Path) -> Iterator[str]:
        from sp_bench import report

        built = report.build([folder])
        yield from built.problems
        if built.num_unread:
            yield "a row that cannot be read counts as done: move its file away, and a run measures that trial again"
        yield f"report: {built.page}"


def _run_sweep(
    arguments: Sequence[str],
    config_dirs: Sequence[Path] | None,
    fail_on: str = FAILURES,
    no_report: bool = False,
    log_to: str | None = None,
    as_json: bool = False,
    pack: tuple[Path, int] | None = None,
) -> None:
    """Compose the trials of these overrides and run them; with --cfg job, show the one config instead."""
    from sp_bench.driver import allocation, campaign, overrides, sweep
    from sp_bench.rows import submissions

    failures = _statuses("--fail-on", fail_on)
    overrides.use_config_dirs(config_dirs or [])
    request = overrides.read_arguments(arguments)
    if request.show_config:
        print(sweep.as_yaml(request), end="")
    else:
        reporter = None if no_report else _Reporter()
        heard = {"hear": _logger(log_to)} if log_to else {}
        asked = sweep.read(request)
        only = submissions.trials_of(*pack) if pack else None
        hosts = allocation.here()
        if hosts.node and not asked.settings.plan_only:
            raise typer.Exit(_serve(asked.settings.folder, hosts))
        statuses = campaign.run(
            asked.configs, asked.settings, reporter, asked.searches, as_json=as_json, only=only, **heard
        )
        _exit_if_failed(statuses, failures)


def _plan_jobs(words: Sequence[str], name: str, config_dirs: Sequence[Path] | None, *, as_json: bool) -> None:
    from sp_bench.cluster import file as cluster
    from sp_bench.cluster import submission
    from sp_bench.driver import overrides, progress, sweep

    overrides.use_config_dirs(config_dirs or [])
    configs, settings = sweep.configs(overrides.read_arguments([*words, "plan_only=true"]))
    planned = submission.planned(configs, settings, cluster.read(name))
    if as_json:
        print(json.dumps(planned.as_json(), indent=1))
    else:
        progress.show_plan(planned.trials, planned.statuses, planned.words)


def _serve(folder: Path, hosts: Any) -> int:
    """This process is of a run whose driver torchrun started on another host: it starts the ranks of this host."""
    from sp_bench.driver import node_agent, nodes

    return node_agent.serve(nodes.file_of(folder, hosts.name), hosts.node, os.environ["MASTER_ADDR"])


def _logger(name: str) -> Any:
    from sp_bench.driver.log_to import Logger  # a run without it need not import it

    return Logger(name)


def _statuses(option: str, given: str) -> Collection[str]:
    """`error,timeout` -> both; `none` -> nothing."""
    from sp_bench.rows import store

    named = [] if given == "none" else given.split(",")
    if unknown := [name for name in named if name not in store.STATUSES]:
        raise ConfigError(
            f"{option} {shown(given)}: {shown(unknown[0]) or 'an empty name'} is no status; use some of "
            f"{', '.join(store.STATUSES)}, or none"
        )
    return named


def _exit_if_failed(statuses: Mapping[str, int], failures: Collection[str]) -> None:
    failed = [f"{statuses[name]} {name}" for name in failures if statuses.get(name)]
    if failed:
        print(f"sp-bench: the latest rows of trials are {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(FAILED)


class _Output:
    """stdout that a run outlives: of a reader that went away (`sp-bench run | head -1`) and of a full disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None  # why nothing is written any more

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost = self.lost or error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # what is still in the buffer, and what follows, goes there
        os.close(nowhere)


def _reflow_help() -> None:
    """Help is as wide as the terminal: lines of a paragraph are joined, but for examples, which are indented."""
    for command in app.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(p if p.startswith(" ") else " ".join(p.split("\n")) for p in paragraphs)


_reflow_help()


def main() -> None:
    """Console entry. Bad input ends in one line and exit code 2; a traceback is a bug of ours."""
    output: Any = _Output(sys.stdout)
    before, sys.stdout = sys.stdout, output
    try:
        os.getcwd()
        app()
    except ConfigError as error:
        print(f"sp-bench: {shown(error, LONGEST)}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except FileNotFoundError as error:
        if _working_folder_is_there():
            raise
        print(f"sp-bench: the working folder was deleted ({error.strerror}): cd to one that is there", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    finally:
        output.flush()
        sys.stdout = before
        if output.lost and output.lost.errno != errno.EPIPE:
            print(f"sp-bench: what was printed is lost: {output.lost.strerror}", file=sys.stderr)
            raise SystemExit(BAD_INPUT)


def _working_folder_is_there() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
