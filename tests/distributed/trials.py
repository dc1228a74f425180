"""Trial configs of whole training steps on gloo ranks, and what a rank makes of a trial: its job and its row."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import here
from torch.distributed.device_mesh import init_device_mesh

from sp_bench import methods, workloads
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import FabricConfig, HardwareConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.model import ModelConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import WorkloadConfig
from sp_bench.driver.record_check import checked
from sp_bench.measure.record import assemble
from sp_bench.measure.timing import Measurement
from sp_bench.rows.row import Outcome
from sp_bench.workloads import Job

TINY = ModelConfig("tiny", 2, 64, 192, 8, 2, 16, 256, 10000.0, 1e-6, True, False, False)
# No width is a multiple of 2, 3 or 4, so that every shard is padded; biases, and a tied head.
ODD = ModelConfig("odd", 3, 65, 131, 4, 4, 10, 257, 10000.0, 1e-6, False, True, True)
TRAIN = WorkloadConfig("train_step", "step", True, 0, 2, 48, "adamw", 1e-3, 1.0, "none")
PARITY = WorkloadConfig("parity", "step", True, 0, 20, 48, "sgd", 0.05, None, "none")


def trial(method: MethodConfig, sp_size: int, **fields: Any) -> TrialConfig:
    """A CPU trial: fp32, the math kernel, the tiny model and one sequence of 48 tokens. `fields` replace these."""
    default = {
        "kernel": KernelConfig("math"),
        "model": TINY,
        "workload": TRAIN,
        "fabric": FabricConfig("gloo", "gloo"),
        "hardware": HardwareConfig("cpu", "cpu"),
        "batch_size": 1,
        "seq_len": 48,
        "dp_replicate_size": 1,
        "dp_shard_size": 1,
        "dtype": "float32",
        "seed": 0,
    }
    return TrialConfig(method=method, sp_size=sp_size, **default | fields)


def job(config: TrialConfig) -> Job:
    """The job of this rank, on a mesh as the worker makes it."""
    layout = methods.get(config.method.name).layout(config.method, config.sp_size)
    sizes = {
        "dp_replicate": config.dp_replicate_size,
        "dp_shard": config.dp_shard_size,
        "ring": layout.ring_degree,
        "ulysses": layout.ulysses_degree,
    }
    inner = ("ring", "ulysses") if layout.ulysses_inner else ("ulysses", "ring")
    names = ("dp_replicate", "dp_shard", *inner)
    mesh = init_device_mesh(here().type, tuple(sizes[name] for name in names), mesh_dim_names=names)
    return Job(config, mesh, here(), lambda phase: None, Path("traces"))


def row(config: TrialConfig) -> dict[str, Any]:
    """The row's columns of a trial: what the worker does between init and hand-over, and then the driver."""
    return assembled(config, workloads.get(config.workload.name).run(job(config)))


def assembled(config: TrialConfig, measurement: Measurement) -> dict[str, Any]:
    """The row's columns, which all ranks and then the driver make of their measurements. It raises Incorrect as they
    do in a trial."""
    gathered: list[Measurement] = [measurement] * config.world_size
    dist.all_gather_object(gathered, measurement)
    record = assemble(config, gathered) | {"environment": {"device_names": []}}
    outcome = checked(Outcome("ok", "done", measured=json.loads(json.dumps(record))), config)
    assert outcome.status == "ok", outcome.reason
    return dict(outcome.measured)
