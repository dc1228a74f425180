"""What the engines on DeepSpeed's ZeRO-3 share: its settings, its optimizer, the parameters' initial values.

Afterwards the process is as it was but for what `methods/_deepspeed.py` names, DS_ACCELERATOR in the
environment, and DeepSpeed's copy of the world's group, which serves the next training of this process.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sp_bench.config.trial import TrialConfig
from sp_bench.measure import ledger
from sp_bench.methods import _deepspeed
from sp_bench.training import train
from sp_bench.training.model import fill

# ZeRO's prefetcher decides from the traced order of the modules, the sizes of its buckets and what is still there which
# parameters are gathered when; small ones are kept, and gathered once, after the update.
UNPREDICTED = ("parameters", "gradients", "optimizer")
CACHE = type(lru_cache(lambda: None))


def settings(config: TrialConfig, *, communication_dtype: str | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration of a trial. Bucket sizes are those that Accelerate and the Trainer fill in for `auto`.

    communication_dtype: what gradients are reduced in; None: DeepSpeed's default, float32 under its own sequence
    parallelism, else the parameters' dtype.
    """
    square = config.model.hidden_size**2
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": square,
        "stage3_prefetch_bucket_size": int(0.9 * square),
        "stage3_param_persistence_threshold": 10 * config.model.hidden_size,
    }
    offload = config.engine.optimizer_offload
    if offload is not None:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": config.hardware.device == "cuda"}
    given = {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.workload.num_micro_batches,
        "gradient_clipping": config.workload.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # SGD
        "zero_force_ds_cpu_optimizer": offload == "deepspeed_cpu_adam",
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "wall_clock_breakdown": False,
        "steps_per_print": 10**9,
    }
    return given if communication_dtype is None else given | {"communication_data_type": communication_dtype}


@contextmanager
def library(device: torch.device) -> Iterator[ModuleType]:
    """DeepSpeed on this device, told of the process group that is already there and of no other."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read at the import; else it asks what the machine has
    with _deepspeed.connected(None) as deepspeed, _no_model_kept():
        yield deepspeed


@contextmanager
def _no_model_kept() -> Iterator[None]:
    """ZeRO-3 leaves each model that it wraps on a list of the process, and each that took two steps in a cache, with
    parameters and optimizer: they would lie in memory while a later training is measured."""
    from deepspeed.runtime.zero import (  # pyright: ignore[reportMissingImports]
        parameter_offload,
        partitioned_param_coordinator,
    )

    before = list(parameter_offload.FWD_MODULE_STACK)
    try:
        yield
    finally:
        parameter_offload.FWD_MODULE_STACK[:] = before
        for cache in gc.get_objects():  # of a method, out of reach behind a decorator
            if type(cache) is CACHE and cache.__module__ == partitioned_param_coordinator.__name__:
                cache.cache_clear()


def make_optimizer(model: nn.Module, config: TrialConfig) -> torch.optim.Optimizer:
    """As `train.make_optimizer`, or one that steps in host memory."""
    if config.engine.optimizer_offload is None:
        return train.make_optimizer(model, config.workload)
    lr = config.workload.learning_rate
    assert lr is not None
    if config.engine.optimizer_offload == "torch_adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    return DeepSpeedCPUAdam(model.parameters(), lr=lr, weight_decay=1e-2, adamw_mode=True)  # torch's default decay


def initialise(parameters: Iterable[tuple[str, int, nn.Parameter]], seed: int) -> None:
    """Fill partitioned parameters with the decoder's initial values; each comes with its name and index there."""
    from deepspeed.runtime.zero import GatheredParameters  # pyright: ignore[reportMissingImports]

    for name, index, parameter in parameters:
        with GatheredParameters(parameter, modifier_rank=0):  # rank 0's values are sent to all
            # drawn as one process draws them, whatever dtype the parameter has
            whole = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            fill(whole, name, index, seed)
            parameter.data.copy_(whole)


def tag_phases(engine: Any) -> None:
    """The ledger's phases of a DeepSpeed engine, whoever calls it."""

    def tagged(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with ledger.phase(phase):
                return function(*args, **kwargs)

        return inside

    engine.backward, engine.step = tagged(engine.backward, "backward"), tagged(engine.step, "optimizer")


def grad_norm(engine: Any, device: torch.device) -> Tensor:
    """Of the whole gradient of the last step, before clipping; not read, so that nothing waits for it."""
    return torch.as_tensor(engine.get_global_grad_norm(), device=device).detach()
