"""Proofs that later trials need not repeat: one JSON file each in a campaign's _proofs, beside the rows.

A record's name is its key, <cell_id>-<env_id>-<machine>.json: the options, the code with its libraries, and the host,
devices, driver and variables of the ranks that proved it. It has a digest of its own content, and is written once.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sp_bench.rows import packed, plain_file

FOLDER = "_proofs"  # in the campaign's folder; readers of rows pass over names that begin so
_FILE = re.compile(r"[0-9a-f]{12}-[0-9a-f]{8}-[0-9a-f]{8}\.json")


@dataclass(frozen=True)
class Proof:
    cell_id: str
    env_id: str
    machine: str  # 8 hex digits, `measure.record.machine_id`
    row: str  # the file of the row whose ranks proved it
    seconds: float  # that their proof took
    found: Mapping[str, Any]  # `columns` of the row, and what later trials are compared with
    counted: Mapping[str, Any]  # columns of that row that were counted in its untimed step

    @property
    def file_name(self) -> str:
        return f"{self.cell_id}-{self.env_id}-{self.machine}.json"


def write(proof: Proof, folder: Path) -> None:
    """Write a record into the campaign `folder`, whole or not at all, unless one of its name can be believed.

    Raises:
        OSError: it cannot be written.
        ValueError: its key is none, or it has a number that is not finite.
    """
    if not _FILE.fullmatch(proof.file_name):
        raise ValueError(f"{proof.file_name} is no key of a proof")
    content = asdict(proof)
    text = json.dumps(content | {"digest": _digest(content)}, allow_nan=False)
    place = folder / FOLDER
    if (place / proof.file_name).exists() and read([place / proof.file_name])[0]:
        return
    place.mkdir(exist_ok=True)
    temporary = place / f".{proof.file_name}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place / proof.file_name)
    finally:
        temporary.unlink(missing_ok=True)
    packed.sync(place)


def read(paths: Iterable[Path]) -> tuple[list[Proof], list[str]]:
    """The records in these files, and one line for each that cannot be believed."""
    proofs, problems = [], []
    for path in paths:
        try:
            proofs.append(_read(path))
        except (ValueError, TypeError, KeyError, OSError) as error:
            problems.append(f"{path}: {error}")
    return proofs, problems


def files(folder: Path) -> list[Path]:
    """The records of a campaign, of which none is opened."""
    return sorted(path for path in (folder / FOLDER).glob("[!.]*.json") if _FILE.fullmatch(path.name))


def by_cell(folder: Path) -> dict[str, list[Path]]:
    """cell_id -> its records, of which none is opened."""
    found: dict[str, list[Path]] = {}
    for path in files(folder):
        found.setdefault(path.name.partition("-")[0], []).append(path)
    return found


def _read(path: Path) -> Proof:
    content = plain_file.json_of(path)
    if not isinstance(content, dict) or content.pop("digest", None) != _digest(content):
        raise ValueError("the proof was edited: its digest is that of another content")
    proof = Proof(**content)
    if proof.file_name != path.name:
        raise ValueError(f"the proof is that of another key, {proof.file_name}")
    return proof


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
