"""The console: `sp-bench` and a verb. Each file of this folder holds a family of verbs, one function a verb."""

import errno
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sp_bench import __version__
from sp_bench.cli import machine, predict, report, rows, run, submit
from sp_bench.cli.keys import WithKeys
from sp_bench.cli.output import Output
from sp_bench.config.parsing import ConfigError, shown

LONGEST = 4000  # characters of an error message
BAD_INPUT = 2  # exit code of errors that the user can correct
OVERRIDES = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}
}  # passed to Hydra unchanged
SWEEP = {**OVERRIDES, "cls": WithKeys}
VERBS: dict[Callable[..., None], dict[str, Any]] = {  # in the order of `sp-bench --help`
    run.run: SWEEP,
    run.resume: SWEEP,
    submit.submit: SWEEP,
    run.plan: SWEEP,
    report.report: {},
    report.archive: {},
    report.compare: {},
    predict.project: {},
    predict.advise: {},
    rows.status: {},
    rows.rm: {},
    rows.export: {},
    rows.pack: {},
    rows.show: {},
    machine.doctor: OVERRIDES,
    machine.methods: {},
}

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from sp_bench.rows import git

        code, dirty = git.state()
        code = f" ({git.short(code, 12)}{', with uncommitted changes' if dirty else ''})" if code else ""
        print(f"sp-bench {__version__}{code}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and the commit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Ulysses sequence parallelism or Ring Attention? Checked first, then timed.

    A sweep becomes trials; each trial is one multi-process job; each attempt leaves one parquet row.
    """


def _reflowed(text: str) -> str:
    """Join the lines of each paragraph, so that help fills the terminal. Indented examples stay."""
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split("\n")) for p in text.split("\n\n"))


for _verb, _settings in VERBS.items():
    app.command(help=_reflowed(inspect.getdoc(_verb) or ""), **_settings)(_verb)


def main() -> None:
    """The console's entry point. Bad input ends in one line and exit code 2; a traceback is a bug."""
    output: Any = Output(sys.stdout)
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
