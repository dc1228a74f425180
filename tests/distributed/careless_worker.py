"""A rank whose trials leave library state behind: the real worker, with a workload that changes process-wide settings.

Each trial writes the settings that it found at its start to `rank<r>.state.json` in its folder.
"""

import json
import os
import sys
from pathlib import Path

import torch

from sp_bench import worker
from sp_bench.measure import ledger
from sp_bench.measure.timing import Measurement
from sp_bench.workloads import Job, attention

honest = attention.run
folders = iter(Path(argument).parent for argument in sys.argv[1:])


def careless(job: Job) -> Measurement:
    found = {setting.name: str(setting.read()) for setting in worker.SETTINGS}
    found["random state"] = str(torch.initial_seed()) + str(torch.get_rng_state().sum().item())
    (next(folders) / f"rank{os.environ['RANK']}.state.json").write_text(json.dumps(found))
    measurement = honest(job)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(3)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    ledger._current.update(phase="backward", attention=True)
    return measurement


attention.run = careless
worker.main([Path(argument) for argument in sys.argv[1:]])
