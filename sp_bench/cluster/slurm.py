"""Slurm's programs, sbatch and squeue, started without a shell. `status` imports this, so it is small."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from sp_bench.config.parsing import shown

ANSWER_S = 60.0  # how long Slurm's programs may take
_FIELDS = ("%i", "%T", "%M", "%R")  # of squeue: id, state, time used, nodes or why it waits


class NoAnswer(Exception):
    """A program of Slurm gave no usable answer; the message says why."""


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits or runs."""

    job_id: int
    state: str  # as squeue has it: PENDING, RUNNING, COMPLETING, ...
    used: str  # run time so far: 1-02:03:04
    where: str  # its nodes, or in brackets why it waits


def submit(text: str) -> int:
    """Hand a batch script to Slurm; returns the job's id.

    Raises:
        NoAnswer: there is no sbatch, or it refuses.
    """
    answer = _answer(["sbatch", "--parsable"], text).strip()
    if not (match := re.fullmatch(r"(\d+)(;\S*)?", answer.splitlines()[-1] if answer else "")):
        raise NoAnswer(f"sbatch printed {shown(repr(answer))} instead of a job id")
    return int(match[1])


def queue() -> dict[int, QueuedJob]:
    """This user's jobs that wait or run.

    Raises:
        NoAnswer: there is no squeue, or it does not reach its controller.
    """
    lines = _answer(["squeue", "--me", "--noheader", f"--format={'|'.join(_FIELDS)}"]).splitlines()
    found = [line.strip().split("|", len(_FIELDS) - 1) for line in lines]
    jobs = [QueuedJob(int(each[0]), *each[1:]) for each in found if len(each) == len(_FIELDS) and each[0].isdecimal()]
    return {job.job_id: job for job in jobs}


def _answer(command: Sequence[str], text: str = "") -> str:
    program = command[0]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError:
        raise NoAnswer(f"there is no {program} on this machine; run this where Slurm's programs are") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{program} did not answer within {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise NoAnswer(f"{program} cannot be started: {error.strerror}") from None
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise NoAnswer(f"{program} failed: {shown(reason, 500)}")
    return done.stdout
