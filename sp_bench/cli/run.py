"""run, resume, plan: a sweep on this machine."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sp_bench.cli.options import (
    FAILURES,
    AsJson,
    ConfigDir,
    FailOn,
    LinkFile,
    Price,
    exit_if_failed,
    listed_statuses,
    write_link,
)
from sp_bench.config.parsing import ConfigError

NoReport = Annotated[bool, typer.Option("--no-report", help="Do not draw the report anew, which takes seconds")]

LogTo = Annotated[
    str | None, typer.Option(metavar="LOGGER", help="Also log each committed row to wandb, mlflow or tensorboard")
]

Pack = Annotated[
    tuple[Path, int] | None,
    typer.Option(metavar="FILE NUMBER", help="Only the trials of this pack of a submission, as its job gives it"),
]


def run(
    context: typer.Context,
    fail_on: FailOn = FAILURES,
    no_report: NoReport = False,
    log_to: LogTo = None,
    link: LinkFile = None,
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

    Measure the links of a machine, for `world=one_rank link=ours`:

        sp-bench run workload=collective method=ulysses,ring,all_gather sp_size=2 --link conf/link/ours.yaml

    Show the config of one trial, and run nothing:

        sp-bench run method=usp sp_size=4 --cfg job

    A second run skips the trials that have rows; `resume` also retries those that failed by bad luck. Two runs at
    once, on one machine or on two that share the folder, share the trials. Exit codes: 0 all trials have rows, 1 the
    latest row of one is an error, incorrect, a timeout or preempted, or all are unsupported, 2 bad input or a folder
    that cannot be written, 130 after Ctrl-C, 143 after SIGTERM.
    """
    _run_sweep(context.args, config_dir, fail_on, no_report, log_to, link=link)


def resume(
    context: typer.Context,
    fail_on: FailOn = FAILURES,
    no_report: NoReport = False,
    log_to: LogTo = None,
    config_dir: ConfigDir = None,
    pack: Pack = None,
) -> None:
    """Continue a sweep: run what has no row yet, and retry what ended as preempted, timeout or error.

    Give the words of the run that you continue, or the folder of a campaign, whose commands are then continued in turn:

        sp-bench resume sweep=smoke seq_len=1024

        sp-bench resume results/night

    Each call makes one attempt at such a trial, and each attempt has its own row. There are at most max_attempts=3,
    the first run included. A trial that is ok, oom or incorrect would end the same way, so it is not retried. An
    unsupported trial runs once the machine can run it. Exit codes: those of run.
    """
    if len(context.args) == 1 and "=" not in context.args[0] and Path(context.args[0]).is_dir():
        if pack:
            raise ConfigError("--pack is for the words of a run; a folder has commands of its own")
        _resume_campaign(Path(context.args[0]), config_dir, fail_on, no_report, log_to)
        return
    _run_sweep([*context.args, "resume=true"], config_dir, fail_on, no_report, log_to, pack=pack)


def _resume_campaign(
    folder: Path, config_dirs: Sequence[Path] | None, fail_on: str, no_report: bool, log_to: str | None
) -> None:
    """Continue each command of a campaign's file, with its own --config-dir folders if none are given. Raises
    typer.Exit with the largest of their exit codes."""
    from sp_bench.rows import campaign_file

    folder = folder.resolve()
    place = [f"campaign={folder.name}", f"results_root={folder.parent}", "resume=true"]
    codes = [0]
    for words, dirs in campaign_file.to_continue(folder, config_dirs or ()):
        print(f"sp-bench resume {shlex.join(words)}")
        try:
            _run_sweep([*words, *place], dirs, fail_on, no_report, log_to)
        except typer.Exit as ended:
            codes.append(ended.exit_code)
    raise typer.Exit(max(codes))


def plan(
    context: typer.Context,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="What submit would do there: packs and GPU-hours too")
    ] = None,
    price: Price = None,
    as_json: AsJson = False,
    config_dir: ConfigDir = None,
) -> None:
    """Show what `run` would do with the same words. Launch nothing and write nothing.

    sp-bench plan sweep=smoke

    sp-bench plan method=ulysses sp_size=2,3,4 model=llama3_8b

    Show what `submit` would do, on nodes as conf/cluster/slurm.yaml describes them:

        sp-bench plan sweep=smoke --cluster slurm
    """
    words = [*context.args, *([] if price is None else [f"price={price}"])]
    if cluster is not None:
        _plan_jobs(words, cluster, config_dir, as_json=as_json)
        return
    _run_sweep([*words, "plan_only=true"], config_dir, as_json=as_json)


def _run_sweep(
    arguments: Sequence[str],
    config_dirs: Sequence[Path] | None,
    fail_on: str = FAILURES,
    no_report: bool = False,
    log_to: str | None = None,
    as_json: bool = False,
    pack: tuple[Path, int] | None = None,
    link: Path | None = None,
) -> None:
    """Compose the trials of a command line and run them; with --cfg job, show the one config instead."""
    from sp_bench.driver import campaign
    from sp_bench.planning import allocation, overrides, sweep
    from sp_bench.rows import campaign_file, submissions

    failures = listed_statuses("--fail-on", fail_on)
    overrides.use_config_dirs(config_dirs or [])
    request = overrides.read_arguments(arguments)
    if request.show_config:
        print(sweep.as_yaml(request), end="")
    else:
        reporter = None if no_report else Reporter()
        logger = {"on_row": _logger(log_to)} if log_to else {}
        found = sweep.read(request)
        messages = any(config.workload.name == "collective" for config in found.configs)
        if link is not None and (found.settings.plan_only or not messages):
            raise ConfigError("--link is made of rows of workload=collective: run that, and without plan_only=true")
        only = submissions.trials_of(*pack) if pack else None
        words = campaign_file.command("resume" if found.settings.resume else "run", arguments, config_dirs or ())
        hosts = allocation.here()
        if hosts.node and not found.settings.plan_only:
            raise typer.Exit(serve(found.settings.folder, hosts))
        statuses = campaign.run(
            found.configs, found.settings, reporter, found.searches, as_json=as_json, only=only, words=words, **logger
        )
        exit_if_failed(statuses, failures)
        if link is not None:
            write_link([found.settings.folder], link)


class Reporter:
    """Makes the report of a run. It imports matplotlib, so it is imported only once rows are there."""

    def effort(self, folder: Path) -> str:
        from sp_bench.analysis.effort import COLUMNS, effort
        from sp_bench.rows import store

        rows, _ = store.read(folder, COLUMNS)
        return effort(rows.to_pylist()).summary()

    def build(self, folder: Path) -> Iterator[str]:
        from sp_bench import report

        built = report.build([folder])
        yield from built.problems
        if built.num_unread:
            yield "a row that cannot be read counts as done: move its file away, and a run measures that trial again"
        yield f"report: {built.page}"


def _logger(name: str) -> Any:
    from sp_bench.driver.log_to import Logger  # a run without it need not import it

    return Logger(name)


def serve(folder: Path, hosts: Any) -> int:
    """Start the ranks of this host for the driver that torchrun started on another host. Returns the exit code."""
    from sp_bench.driver import node_agent, nodes

    return node_agent.serve(nodes.file_of(folder, hosts.name), hosts.node, os.environ["MASTER_ADDR"])


def _plan_jobs(words: Sequence[str], name: str, config_dirs: Sequence[Path] | None, *, as_json: bool) -> None:
    from sp_bench.cluster import file as cluster
    from sp_bench.cluster import submission
    from sp_bench.driver import progress
    from sp_bench.planning import overrides, sweep

    overrides.use_config_dirs(config_dirs or [])
    configs, settings = sweep.configs(overrides.read_arguments([*words, "plan_only=true"]))
    planned = submission.planned(configs, settings, cluster.read(name))
    if as_json:
        print(json.dumps(planned.as_json(), indent=1))
    else:
        progress.show_plan(planned.trials, planned.statuses, planned.words)
