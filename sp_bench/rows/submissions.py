"""What was submitted to a cluster: one JSON file a submission, in `_work/submissions` of its campaign.

It has the packs, of each the trials and, once Slurm has it, the job's id. It is there before the first job, since a job
reads its trials from it.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sp_bench.config.parsing import ConfigError, shown
from sp_bench.rows import plain_file, store

FOLDER = "submissions"  # in the campaign's _work


def new_file(folder: Path) -> Path:
    """Where a submission that begins now writes, for the campaign in `folder`."""
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.json"
    return folder / store.WORK / FOLDER / name


def write(file: Path, shared: Mapping[str, Any], packs: Sequence[Mapping[str, Any]], job_ids: Sequence[int]) -> None:
    """Write a submission's file, whole or not at all. shared: the fields of all packs. The first packs have jobs.

    Raises:
        OSError: it cannot be written.
    """
    ids = [*job_ids, *[None] * (len(packs) - len(job_ids))]
    content = {**shared, "packs": [{"job_id": job_id, **pack} for job_id, pack in zip(ids, packs, strict=True)]}
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(json.dumps(content), "utf-8")
    os.replace(temporary, file)


def jobs(folder: Path) -> dict[int, frozenset[str]]:
    """Id -> trial_ids of all jobs that were submitted for the campaign in `folder`. Damaged files are passed over."""
    files = sorted((folder / store.WORK / FOLDER).glob("[!.]*.json"))
    return {job_id: trials for file in files for job_id, trials in _packs_of(file) if job_id is not None}


def trials_of(file: Path, number: int) -> frozenset[str]:
    """The trial_ids of pack `number` of a submission.

    Raises:
        ConfigError: no such file, or no such pack in it.
    """
    found = [trials for _, trials in _packs_of(file)]
    if not 0 <= number < len(found):
        raise ConfigError(
            f"--pack {shown(file)} {number}: the file has {len(found)} packs, counted from 0; "
            "`sp-bench submit` writes it"
        )
    return found[number]


def _packs_of(file: Path) -> Iterator[tuple[int | None, frozenset[str]]]:
    """(id of its job or None, trial_ids) of each pack."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        for pack in plain_file.json_of(file)["packs"]:
            job_id = pack["job_id"]
            yield None if job_id is None else int(job_id), frozenset(map(str, pack["trials"]))
