"""The hosts of this run, from the variables that Slurm or torchrun set."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sp_bench.config.parsing import ConfigError

WAY_OUT = "docs/CLUSTER.md has the commands"


@dataclass(frozen=True)
class Allocation:
    """The hosts of a run. The driver is on node 0."""

    by: Literal["nobody", "slurm", "torchrun"]
    num_hosts: int = 1
    node: int = 0  # that this process is on
    name: str = ""  # torchrun: what the processes that it started on all hosts share, and those of others do not


def here(variables: Mapping[str, str] = os.environ) -> Allocation:
    """The hosts of this run.

    Raises:
        ConfigError: several processes of one run on one host, or several drivers of one srun, which would share the
            trials and never join in one.
    """
    if "TORCHELASTIC_RUN_ID" in variables:
        return _of_torchrun(variables)
    if (num_tasks := int(variables.get("SLURM_STEP_NUM_TASKS", "1"))) > 1:
        raise ConfigError(
            f"srun starts {num_tasks} runs (SLURM_PROCID={variables.get('SLURM_PROCID')} of "
            f"SLURM_NTASKS={variables.get('SLURM_NTASKS')}), which would share the trials and never join in one. Start "
            "one, which starts the ranks on all nodes of the job itself: `sp-bench run num_nodes="
            f"{variables.get('SLURM_STEP_NUM_NODES', '2')} ...` in the batch script, or `srun --nodes=1 --ntasks=1 "
            f"sp-bench run ...`; sp-bench submit does it for you ({WAY_OUT})"
        )
    if "SLURM_JOB_ID" in variables and "SLURMD_NODENAME" in variables:  # in a job, and not beside one as with salloc
        return Allocation("slurm", int(variables.get("SLURM_JOB_NUM_NODES", "1")))
    return Allocation("nobody")


def _of_torchrun(variables: Mapping[str, str]) -> Allocation:
    if (processes := int(variables["LOCAL_WORLD_SIZE"])) > 1:
        raise ConfigError(
            f"torchrun starts {processes} runs on this host; use --nproc-per-node=1: a run starts the ranks itself "
            f"({WAY_OUT})"
        )
    name = "-".join(variables[each] for each in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    return Allocation("torchrun", int(variables["WORLD_SIZE"]), int(variables["RANK"]), name)
