"""Rows that are no longer wanted: moved out of a campaign, and kept beside it."""

import os
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sp_bench.config.parsing import ConfigError, shown
from sp_bench.rows import packed, store
from sp_bench.rows.store import RowName

FOLDER = "removed"  # in the campaign's WORK


def chosen(
    campaign: Path, statuses: Collection[str] = (), trials: Sequence[str] = (), cells: Sequence[str] = ()
) -> list[RowName]:
    """The rows with one of the statuses, of one of the trials and of one of the cells; what is empty does not choose.
    Ids may be beginnings of ids.

    Raises:
        ConfigError: nothing chooses, or less than the beginning of an id, so that many rows would be meant.
    """
    for given in (*trials, *cells):
        if not re.fullmatch(r"[0-9a-f]{4,12}", given):
            raise ConfigError(
                f"{shown(given) or 'an empty text'} is no id: give its 12 hex digits, or 4 and more of them"
            )
    if not (statuses or trials or cells):
        raise ConfigError("say which rows: --status error,timeout, --trial TRIAL_ID or --cell CELL_ID")
    of_cells = None
    if cells:
        rows, _ = store.read(campaign, ("trial_id", "cell_id"))
        of_cells = {row["trial_id"] for row in rows.to_pylist() if (row["cell_id"] or "").startswith(tuple(cells))}
    return sorted(
        (
            row
            for row in store.committed(campaign)
            if (not statuses or row.status in statuses)
            and (not trials or row.trial_id.startswith(tuple(trials)))
            and (of_cells is None or row.trial_id in of_cells)
        ),
        key=lambda row: row.file_name,
    )


def move(campaign: Path, rows: Sequence[RowName]) -> Path:
    """Move rows into a new folder of the campaign's WORK, and return it. A row that is gone already is passed over.

    Raises:
        ConfigError: a row is in the campaign's pack, or the campaign cannot be written; what was moved until then stays
            there.
    """
    if in_pack := [
        row for row in rows if not (campaign / row.file_name).exists() and row.file_name in packed.names(campaign)
    ]:
        raise ConfigError(
            f"{len(in_pack)} of these rows are in {campaign / packed.PACK}; unpack it first: "
            f"sp-bench pack {campaign} --undo"
        )
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    target = campaign / store.WORK / FOLDER / stamp
    try:
        target.mkdir(parents=True)
        for row in rows:
            try:
                os.replace(campaign / row.file_name, target / row.file_name)
            except FileNotFoundError:
                continue
    except OSError as error:
        raise ConfigError(f"rows of {campaign} cannot be moved: {error.strerror} ({error.filename})") from error
    return target
