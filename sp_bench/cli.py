"""The console: `sp-bench run | plan | report | status | doctor | methods`."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sp_bench import results
from sp_bench.parsing import ConfigError
from sp_bench.progress import console

BAD_INPUT = 2  # exit code of everything that the user can put right
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.callback()
def describe() -> None:
    """Ulysses sequence parallelism or Ring Attention? Proven right first, then timed.

    A sweep becomes trials; each trial is one fresh multi-process job; each attempt leaves one parquet row.
    """


@app.command(context_settings=PASS_ON)
def run(context: typer.Context) -> None:
    """Run a sweep: every trial that has no row yet leaves one.

    Values with commas are swept, and all combinations run:

        sp-bench run method=ulysses,ring sp_size=2,4 seq_len=4096,8192

    A sweep of conf/sweep, with a field replaced in all of its blocks:

        sp-bench run sweep=smoke seq_len=1024

    A full training step, six replicates of each cell, into results/night:

        sp-bench run workload=train_step method=ring,usp sp_size=4 replicates=6 campaign=night

    What a trial's config looks like when composed:

        sp-bench run method=usp sp_size=4 --cfg job

    Run it again, and what is committed is skipped. Exit codes: 0 all trials have rows, 2 bad input, 130 interrupted.
    """
    _hand_over(context.args)


@app.command(context_settings=PASS_ON)
def plan(context: typer.Context) -> None:
    """Show what `run` would do with the same overrides; launch and write nothing.

    sp-bench plan sweep=smoke

    sp-bench plan method=ulysses sp_size=2,3,4 model=llama3_8b
    """
    _hand_over([*context.args, "plan_only=true"])


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Campaign folders, such as results/smoke")],
    out: Annotated[Path | None, typer.Option(help="Where the page goes; default: _work/report of the first")] = None,
) -> None:
    """Make the page and figures from the rows of campaigns.

    sp-bench report results/smoke

    sp-bench report results/monday results/tuesday --out page
    """
    from sp_bench import report as reports

    built = reports.build(_existing(folders), out)
    for problem in built.problems:
        print(problem)
    print(f"report: {built.page}")


@app.command()
def status(folders: Annotated[list[Path], typer.Argument(help="Campaign folders, such as results/smoke")]) -> None:
    """Count a campaign's rows by environment and status, from file names alone.

    sp-bench status results/smoke
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("campaign", "env_id", *results.STATUSES):
        table.add_column(heading, justify="left" if heading in ("campaign", "env_id") else "right")
    for folder in _existing(folders):
        latest = {(r.trial_id, r.env_id): r for r in sorted(results.committed(folder), key=lambda r: r.attempt)}
        counts = Counter((row.env_id, row.status) for row in latest.values())
        for env_id in sorted({env_id for env_id, _ in counts}):
            table.add_row(folder.name, env_id, *(str(counts[env_id, status]) for status in results.STATUSES))
        if not latest:
            table.add_row(folder.name, "no rows")
    console().print(table)


@app.command(context_settings=PASS_ON)
def doctor(
    context: typer.Context,
    curves: Annotated[bool, typer.Option("--curves", help="Measure latency and bandwidth of each fabric")] = False,
) -> None:
    """Say what this machine has: devices, libraries, and which kernels and methods run here or why not.

    sp-bench doctor

    With --curves, instead: how fast each fabric of this machine moves messages, for each primitive. It runs
    sweep=fabrics - over gloo without two GPUs - as `run` would, with the same overrides, so that each curve is a row of
    results/fabrics, and what is committed is not measured again:

        sp-bench doctor --curves

        sp-bench doctor --curves fabric=nvlink,shm sp_size=8 results_root=/data/results
    """
    from sp_bench import doctor as examination

    if not curves:
        if context.args:
            raise ConfigError(f"{' '.join(context.args)}: plain doctor takes no overrides; doctor --curves does")
        examination.show()
        return
    arguments = [*examination.fabrics_here(), *context.args]
    _hand_over(arguments)
    examination.show_curves(arguments)


@app.command()
def methods() -> None:
    """Show which method can split which heads over how many ranks, and why not where it cannot.

    sp-bench methods
    """
    from sp_bench import doctor as examination

    examination.show_methods()


def _existing(folders: Sequence[Path]) -> list[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder of results")
    return list(folders)


def _hand_over(arguments: Sequence[str]) -> None:
    """Give the checked overrides to Hydra, whose sweeper and launcher (hydra_plugins) do the rest.

    The cells' overrides reach the sweeper as its own setting: Hydra would also apply them to the campaign's config,
    where an option of a swept method has no place.
    """
    import hydra

    from sp_bench import overrides

    request = overrides.read_arguments(arguments)
    if request.show_config:
        argv = ["--cfg", "job", *request.campaign, *request.cells]
    else:
        argv = ["--multirun", *request.campaign, f"hydra.sweeper.overrides={overrides.quoted_list(request.cells)}"]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print, and `main` says it in one line
    sys.argv = [sys.argv[0], *argv]
    hydra.main(config_path=str(overrides.conf_folder()), config_name="config", version_base="1.3")(_unused_task)()


def _unused_task(config: object) -> None:
    raise AssertionError("a multirun calls the launcher, never the task")


def main() -> None:
    """Console entry. Bad input ends in one line and exit code 2; a traceback is a bug of ours."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        app()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        print(f"sp-bench: {lines[0] if lines else type(error).__name__}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
