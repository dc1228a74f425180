"""Options, exit codes and checks that several verbs share."""

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from sp_bench.config.machine import require_link_file
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.planning.settings import require_price

SHOWN = 20  # skipped files that are named
FAILED = 1  # exit code when --fail-on finds something
FAILURES = "error,incorrect,timeout,preempted"  # default of --fail-on; oom is a result
MISSING = "missing"  # instead of the status of a trial without a row

FailOn = Annotated[
    str, typer.Option(metavar="STATUSES", help="Exit with 1 if the latest row of a trial has one of these; or none")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs")]

Price = Annotated[
    float | None, typer.Option(callback=require_price, help="Of a GPU-hour, in any currency: show what it costs")
]

LinkFile = Annotated[
    Path | None,
    typer.Option(
        callback=require_link_file,
        metavar="FILE.yaml",
        help="Write the times of these messages to this file, for world=one_rank link=NAME",
    ),
]

ConfigDir = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER",
        help="With files of your own in sweep, model, hardware, fabric, link, cluster; may be repeated",
    ),
]


def given_options(context: typer.Context) -> set[str]:
    """The options on the command line."""
    sources = {each.opts[0]: context.get_parameter_source(each.name) for each in context.command.params if each.name}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"} - {"folders"}


def require_together(given: Collection[str], takes: Mapping[str, Collection[str]]) -> None:
    """Refuse two outputs at once, and options that one would ignore. takes: output -> the options that it reads."""
    outputs = [option for option in takes if option in given]
    if len(outputs) > 1:
        raise ConfigError(f"{' and '.join(outputs)}: one of these at a time; run it once for each")
    for output in outputs:
        if ignored := sorted(set(given) - set(takes[output]) - {output}):
            reads = f"takes {', '.join(sorted(takes[output]))}" if takes[output] else "takes no other option"
            raise ConfigError(f"{output} with {', '.join(ignored)}: {output} {reads}")


def named_campaigns(named: Sequence[Path]) -> list[Path]:
    """The campaign folders. A plain file among several, as results/* may have, is skipped with a note."""
    from sp_bench.rows.store import require_campaigns

    files = [path for path in named if path.is_file()] if len(named) > 1 else []
    folders = require_campaigns([path for path in named if path not in files])
    for path in files:
        print(f"sp-bench: {shown(path)} is not a folder of results; passed over", file=sys.stderr)
    return folders


def write_link(folders: Sequence[Path], file: Path) -> None:
    """Write a file of conf/link from the `collective` rows of campaigns."""
    from sp_bench.report import link_file

    try:
        text = link_file.text(folders, file)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"no link in {shown(file)}: {shown(error)}") from error
    print(f"link: {file}")


def listed_statuses(option: str, given: str) -> Collection[str]:
    """The statuses in a list such as `error,timeout`; empty for `none`."""
    from sp_bench.rows import store

    named = [] if given == "none" else given.split(",")
    if unknown := [name for name in named if name not in store.STATUSES]:
        raise ConfigError(
            f"{option} {shown(given)}: {shown(unknown[0]) or 'an empty name'} is no status; use some of "
            f"{', '.join(store.STATUSES)}, or none"
        )
    return named


def exit_if_failed(statuses: Mapping[str, int], failures: Collection[str]) -> None:
    """Exit with 1 if a trial ended as one of `failures`, or trials have no row. If there are `failures`, also if no
    trial can run here."""
    failed = [f"{statuses[name]} {name}" for name in failures if statuses.get(name)]
    if failed:
        print(f"sp-bench: the latest rows of trials are {', '.join(failed)}", file=sys.stderr)
    if missing := statuses.get(MISSING, 0):
        print(f"sp-bench: {missing} of {sum(statuses.values())} trials have no row", file=sys.stderr)
    nothing_ran = bool(failures and statuses.get("unsupported")) and set(+Counter(statuses)) == {"unsupported"}
    if nothing_ran:
        print(f"sp-bench: all {statuses['unsupported']} trials are unsupported here; the rows say why", file=sys.stderr)
    if failed or missing or nothing_ran:
        raise typer.Exit(FAILED)
