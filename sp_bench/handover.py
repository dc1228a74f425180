"""The files through which a trial's ranks speak to the process that launched them. No torch.

In the trial's work folder: trial.json and proofs.json (parent -> ranks), rank<r>.events.jsonl and rank<r>.log (each
rank -> parent), record.json and proof.json (rank 0 -> parent, only when the trial is ok).
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp_bench.config import outside
from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig

TRIAL, RECORD = "trial.json", "record.json"
RECORD_TEMPORARY = f".{RECORD}"
PROOFS, PROOF = "proofs.json", "proof.json"
LISTEN_FD = "SP_BENCH_LISTEN_FD"  # the variable that names rank 0's inherited socket, listening at MASTER_PORT
# The variable by which the processes of a host have one clock: what the monotonic clock lacks to the epoch, in seconds
CLOCK_OFFSET_S = "SP_BENCH_CLOCK_OFFSET_S"
_OFFSET_S = float(os.environ.get(CLOCK_OFFSET_S, time.time() - time.monotonic()))
# in the order a rank passes them; in `handover` the ranks' samples become one record
PHASES = ("init", "correctness", "warmup", "measure", "ledger", "handover", "done")


@dataclass(frozen=True)
class Event:
    """`name` is a phase entered, or `failed` with a status, a reason and, for oom, a site."""

    rank: int
    at: float  # as `now` gives it
    name: str
    status: str | None = None
    reason: str | None = None
    oom_site: str | None = None


def now() -> float:
    """Seconds since the epoch by the clock that a launch's processes on this host share. A step of the machine's clock
    does not move it; those of other hosts agree as well as the clocks did when their first process began."""
    return time.monotonic() + _OFFSET_S


def clock() -> dict[str, str]:
    """The variables that give a process of this host the same `now`."""
    return {CLOCK_OFFSET_S: repr(_OFFSET_S)}


def write_trial(folder: Path, config: TrialConfig, replicate: int) -> Path:
    """Write the config, and beside it what no config has: the replicate, and the file of a method that came by
    `method.path`."""
    file = outside.file_of(config.method.name)
    path = folder / TRIAL
    trial = {"config": config.to_mapping(), "replicate": replicate, "method_path": file and str(file)}
    path.write_text(json.dumps(trial, indent=1))
    return path


def read_trial(path: Path) -> tuple[TrialConfig, int]:
    """The config and the replicate. The file of its method, if one is named, becomes known to this process."""
    trial = json.loads(path.read_text())
    if trial["method_path"]:
        outside.add_file(Path(trial["method_path"]))
    return parse(TrialConfig, trial["config"]), trial["replicate"]


def write_proofs(folder: Path, found: Mapping[str, Any]) -> None:
    """Write what earlier trials of the same options and code have proven, by the machine on which they did."""
    (folder / PROOFS).write_text(json.dumps(found))


def read_proofs(folder: Path) -> dict[str, Any]:
    return _read(folder / PROOFS) or {}


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def traces(folder: Path) -> Path:
    """Where a trial that runs in `folder` leaves traces: it stays, beside the folders of trials."""
    return folder.parents[1] / "traces" / folder.name


def compiled(folder: Path) -> Path:
    """Where libraries keep what they compile, for all trials of the campaign of the one that runs in `folder`."""
    return folder.parents[1] / "compiled"


def send_event(folder: Path, event: Event) -> None:
    """Append one line in one write, so that a reader never sees half of it after the newline."""
    line = json.dumps({k: v for k, v in vars(event).items() if v is not None}) + "\n"
    with open(folder / f"rank{event.rank}.events.jsonl", "ab", buffering=0) as file:
        file.write(line.encode())


def enter_phase(folder: Path, rank: int, name: str) -> None:
    send_event(folder, Event(rank, now(), name))


def read_events(folder: Path) -> list[Event]:
    """The events of all ranks, by time. A last line without newline is still being written and is left for later."""
    lines = [line for path in folder.glob("rank*.events.jsonl") for line in path.read_text().splitlines(keepends=True)]
    events = [Event(**json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted(events, key=lambda event: event.at)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Row columns of an ok trial; appears whole or not at all."""
    temporary = folder / RECORD_TEMPORARY
    temporary.write_text(json.dumps(record))
    os.replace(temporary, folder / RECORD)


def write_proof(folder: Path, machine: str, found: Mapping[str, Any] | None) -> None:
    """What this trial proved on its machine; None: it relies on the proof that it was given for that. Written before
    the record, with which a trial ends."""
    (folder / PROOF).write_text(json.dumps({"machine": machine, "found": found}))


def read_record(folder: Path) -> Any:
    """What rank 0 handed over, columns if it is honest; its text if that is no JSON; None if there is nothing."""
    return _read(folder / RECORD)


def read_proof(folder: Path) -> Any:
    """The same of its proof: machine and found."""
    return _read(folder / PROOF)


def _read(path: Path) -> Any:
    if not path.exists():
        return None
    text = path.read_text(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
