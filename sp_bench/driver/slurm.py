"""Slurm: the batch script of a pack, sbatch, and squeue. No shell starts its programs."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sp_bench.config.parsing import ConfigError, shown
from sp_bench.driver.cluster import PLACE, ClusterConfig
from sp_bench.driver.packs import Pack

NOTICE_S = 120  # before the time limit: how early the run is told, so that it records the running trial
ANSWER_S = 60.0  # how long Slurm's programs may take
_FIELDS = ("%i", "%T", "%M", "%R")  # of squeue: id, state, time used, nodes or why it waits
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+@=,:-]+")  # in sbatch, % and \ stand for something else


class NoAnswer(Exception):
    """Slurm did not say what was asked; the message says why."""


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits or runs."""

    job_id: int
    state: str  # as squeue has it: PENDING, RUNNING, COMPLETING, ...
    used: str  # run time so far: 1-02:03:04
    where: str  # its nodes, or in brackets why it waits


def script(pack: Pack, cluster: ClusterConfig, job_name: str, log: Path, folder: Path, command: Sequence[str]) -> str:
    """The batch script that runs `command` in `folder`. `log`: a file for what it prints, %j in it being the job's id.

    Raises:
        ConfigError: a log that sbatch would take for another.
    """
    if not _PLAIN_PATH.fullmatch(str(log).replace("%j", "")):
        raise ConfigError(
            f"sbatch cannot write its log to {shown(log)}: it reads blanks, quotes, % and the like as its own; use a "
            "results_root of letters, digits and _./+@=,:-"
        )
    asked = {
        "job-name": job_name,
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "nodes": pack.num_nodes,
        "ntasks": pack.num_nodes,
        "gres": cluster.gres.replace(PLACE, str(pack.gpus_per_node)) if pack.gpus_per_node else None,
        "cpus-per-task": cluster.cpus_per_task,
        "mem": cluster.memory,
        "time": pack.minutes,
        "signal": f"B:TERM@{NOTICE_S}",  # to the script alone, which has become the run: that ends its ranks itself
        "output": log,
        "open-mode": "append",  # a job that is started again continues its log, too
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in asked.items() if value is not None]
    lines += ["#SBATCH --exclusive"] * cluster.exclusive
    lines += ["#SBATCH --requeue"]  # a preempted job waits again, and then goes on with what has no row
    lines += [f"cd {shlex.quote(str(folder))} || exit 1", *cluster.setup]
    words = [*cluster.container, *command]
    return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join(words)}", ""])


def submit(text: str) -> int:
    """Hand a batch script to Slurm; returns the job's id.

    Raises:
        NoAnswer: there is no sbatch, or it refuses.
    """
    said = _answer(["sbatch", "--parsable"], text).strip()
    if not (match := re.fullmatch(r"(\d+)(;\S*)?", said.splitlines()[-1] if said else "")):
        raise NoAnswer(f"sbatch said {shown(repr(said))} instead of a job id")
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
