"""status, rm, export, pack, show: the rows of a campaign."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sp_bench.cli.options import SHOWN, AsJson, listed_statuses, named_campaigns
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.driver.progress import console


def status(
    folders: Annotated[list[Path], typer.Argument(help="Campaign folders, such as results/smoke")],
    as_json: AsJson = False,
) -> None:
    """Show the state of a campaign: rows by status, planned and remaining trials, jobs, running processes, and why
    trials failed.

    sp-bench status results/smoke

    Of each trial the latest attempt counts, once for each env_id it was measured with: a hash of packages, device and
    measuring code, which differs from method to method. What is planned is what the run that began last has. Files that
    are not rows are named, and rows that are damaged or contradict themselves, which reports leave out. squeue says
    which jobs of `submit` wait or run. With several campaigns, failures are counted and their reasons left out, no row
    is opened, and what _campaign.yaml says is left out.
    """
    from sp_bench.analysis.effort import COLUMNS, effort
    from sp_bench.costs import slow_devices
    from sp_bench.look import status as state
    from sp_bench.rows import store

    folders = named_campaigns(folders)
    found = [state.overview(folder, reasons=as_json or len(folders) == 1) for folder in folders]
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
    for folder, each in zip(folders, found, strict=True):
        for line in (*state.lines(each), *state.notes(folder, whole=len(folders) == 1)):
            print(line)
    if len(folders) == 1 and sum(found[0].counts.values()) <= state.MAX_CHECKED:
        rows = store.read(folders[0], sorted({*COLUMNS, *slow_devices.COLUMNS}))[0].to_pylist()
        for line in filter(None, (*slow_devices.slow_devices(rows), effort(rows).summary())):
            print(f"  {shown(line, 1000)}")
    passed_over = [line for each in found for line in each.passed_over]
    for line in passed_over[:SHOWN]:
        print(line)
    if more := passed_over[SHOWN:]:
        print(f"and {len(more):,} further files")


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

    List the rows that would be moved:

        sp-bench rm results/night --status unsupported,error

    Move them:

        sp-bench rm results/night --status unsupported,error --yes

    Rows of one trial, or of one cell with all its replicates, whatever their status:

        sp-bench rm results/night --trial 0a1b2c3d4e5f --yes --force

    Rows that are ok stay, unless --force is given. Exit codes: 0 done, 2 bad input.
    """
    from sp_bench.formats import counted
    from sp_bench.rows import removed
    from sp_bench.rows.store import require_campaigns

    (campaign,) = require_campaigns([folder])
    rows = removed.chosen(campaign, listed_statuses("--status", status_), trial or [], cell or [])
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


def export(
    folders: Annotated[list[Path], typer.Argument(metavar="CAMPAIGN", help="Campaign folders, such as results/smoke")],
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="csv | json")] = "csv",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write there instead of printing")] = None,
) -> None:
    """Print rows as CSV or JSON: one line per row, without the columns that are lists.

        sp-bench export results/night --out night.csv

    `report --export` prints the tables of a report instead. Exit codes: 0 done, 2 bad input.
    """
    from sp_bench.rows import consistency, flat, store

    if form not in flat.FORMATS:
        raise ConfigError(f"--format {shown(form)}: unknown; use one of {', '.join(flat.FORMATS)}")
    tables = []
    for campaign in store.require_campaigns(folders):
        rows, problems = consistency.read(campaign, flat.FLAT)
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


def pack(
    folders: Annotated[list[Path], typer.Argument(metavar="CAMPAIGN", help="Campaign folders, such as results/smoke")],
    undo: Annotated[bool, typer.Option("--undo", help="Make a file of each row again")] = False,
) -> None:
    """Put all rows of a campaign into one file, packed.parquet, which is many times smaller.

    All verbs read packed rows as they read files, and so do pandas, DuckDB and polars. New rows are separate files
    until the campaign is packed again:

        sp-bench pack results/night

    The file is read back and compared before a row's own file is removed. A campaign in which a run works is refused.
    `rm` moves only rows that are files, so unpack first:

        sp-bench pack results/night --undo

    Exit codes: 0 done, 2 bad input or a campaign in use.
    """
    from sp_bench.formats import counted, in_bytes
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
    from sp_bench.rows import store

    campaigns = named_campaigns(folders) if folders else store.campaigns_of(Path("results"))
    for line in showing.lines(showing.find(trial, campaigns)):
        print(line)
