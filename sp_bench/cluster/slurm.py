"""Slurm's programs, sbatch and squeue. `status` imports this, so it is small."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sp_bench import programs
from sp_bench.config.parsing import shown
from sp_bench.programs import NoAnswer

ANSWER_S = 60.0  # how long Slurm's programs may take
_FIELDS = ("%i", "%T", "%M", "%R")  # of squeue: id, state, time used, nodes or why it waits
_OF_AN_ALLOCATION = re.compile(r"SLURM_|SLURMD_|SBATCH_|SALLOC_|SRUN_|PMI_|PMIX_")
_STAYS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})  # the cluster, and the user


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits or runs."""

    job_id: int
    state: str  # squeue's: PENDING, RUNNING, COMPLETING, ...
    used: str  # run time so far: 1-02:03:04
    where: str  # its nodes, or the reason why it waits, in brackets


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
    """This user's waiting and running jobs.

    Raises:
        NoAnswer: there is no squeue, or it cannot reach its controller.
    """
    lines = _answer(["squeue", "--me", "--noheader", f"--format={'|'.join(_FIELDS)}"]).splitlines()
    found = [line.strip().split("|", len(_FIELDS) - 1) for line in lines]
    jobs = [QueuedJob(int(each[0]), *each[1:]) for each in found if len(each) == len(_FIELDS) and each[0].isdecimal()]
    return {job.job_id: job for job in jobs}


def _answer(command: Sequence[str], text: str = "") -> str:
    if not shutil.which(command[0]):
        raise NoAnswer(f"there is no {command[0]} on this machine; run this where Slurm's programs are")
    return programs.answer(command, stdin=text, limit_s=ANSWER_S, variables=without_allocation(os.environ))


def without_allocation(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of the current Slurm job or step, and without SBATCH_*, which would override the
    printed script. The rest stays, since sbatch passes its environment to the job."""
    return {name: value for name, value in variables.items() if name in _STAYS or not _OF_AN_ALLOCATION.match(name)}
