"""The batch script of a pack, for Slurm."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from sp_bench.cluster.file import DIRECTIVES, PLACE, ClusterConfig
from sp_bench.cluster.packs import Pack
from sp_bench.config.parsing import ConfigError, shown

NOTICE_S = 120  # before the time limit the run gets a signal, so that it records the running trial
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+@=,:-]+")  # sbatch gives % and \ a meaning


def script(pack: Pack, cluster: ClusterConfig, job_name: str, log: Path, folder: Path, command: Sequence[str]) -> str:
    """The batch script that runs `command` in `folder`. log: the file of its output; %j is the job's id.

    Raises:
        ConfigError: sbatch would write to another file than `log`.
    """
    if not _PLAIN_PATH.fullmatch(str(log.parent)):
        raise ConfigError(
            f"sbatch cannot write its log to {shown(log)}: it reads blanks, quotes, % and the like as its own; use a "
            "results_root of letters, digits and _./+@=,:-"
        )
    directives = {
        "job-name": job_name,
        **{option: getattr(cluster, field) for field, option in DIRECTIVES.items()},
        "nodes": pack.num_nodes,
        "ntasks": pack.num_nodes,
        "gres": cluster.gres.replace(PLACE, str(pack.gpus_per_node)) if pack.gpus_per_node else None,
        "cpus-per-task": cluster.cpus_per_task,
        "time": pack.minutes,
        "signal": f"B:TERM@{NOTICE_S}",  # to the script alone, whose process is the run; it ends its ranks itself
        "output": log,
        "open-mode": "append",  # a requeued job continues its log
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in directives.items() if value is not None]
    lines += ["#SBATCH --exclusive"] * cluster.exclusive
    lines += [f"#SBATCH {word}" for word in cluster.sbatch]
    lines += ["#SBATCH --requeue"]  # a preempted job is queued again and continues with trials without a row
    lines += [f"cd {shlex.quote(str(folder))} || exit 1", *cluster.setup]
    words = [*cluster.container, *command]
    return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join(words)}", ""])
