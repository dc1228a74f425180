"""What the engines on DeepSpeed's ZeRO-3 share: settings, optimizer, initial values, and tags for the ledger.

What stays in the process afterwards: what `methods/_deepspeed.py` names, DS_ACCELERATOR in the environment, and
DeepSpeed's copy of the group of all ranks, which the next training of this process uses again.
"""

import fcntl
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_bench.config.trial import TrialConfig
from sp_bench.measure import ledger, timing
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import _deepspeed
from sp_bench.training import train
from sp_bench.training.model import fill
from sp_bench.training.train import Part, Watch

# ZeRO's prefetcher decides while it runs which parameters are gathered when: from the order of the modules that it has
# traced, from the sizes of its buckets, and from what is still in memory. Small parameters are kept, and gathered once
# after the update.
UNPREDICTED = ("parameters", "gradients", "optimizer")
CACHE = type(lru_cache(lambda: None))  # the class of functions cached by functools


def settings(config: TrialConfig, *, communication_dtype: str | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration for a trial. Bucket sizes are those that Accelerate and the Trainer set for `auto`.

    communication_dtype: the dtype in which gradients are reduced. None: DeepSpeed's default, which is float32 under its
    own sequence parallelism, and otherwise the parameters' dtype.
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
def library(config: TrialConfig, device: torch.device) -> Iterator[ModuleType]:
    """Yields the deepspeed module for this device, which inside communicates over torch's process group."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read at the import; otherwise DeepSpeed guesses the device
    with _deepspeed.connected(None) as deepspeed, _no_model_kept(), _flattened_on(device):
        _import_muon()
        if config.engine.optimizer_offload == "deepspeed_cpu_adam":
            _compile_adam()
        yield deepspeed


def _compile_adam() -> None:
    """Compile DeepSpeed's Adam for host memory, or load what was compiled: minutes, once for a user.

    A process that is killed meanwhile, as at a trial's deadline, leaves torch's lock beside it, for which all later
    ones would wait for ever. So ranks take turns by a lock that ends with its process; who has it removes torch's. The
    folder is of this package, so that no other program compiles there.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder  # pyright: ignore[reportMissingImports]
    from torch.utils import cpp_extension  # imports setuptools

    builder = CPUAdamBuilder()
    folder = Path(cpp_extension._get_build_directory("sp_bench", False))
    with (folder / "turn").open("w") as turn, _extensions_in(folder):
        fcntl.flock(turn, fcntl.LOCK_EX)
        (folder / builder.name / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)


@contextmanager
def _extensions_in(folder: Path) -> Iterator[None]:
    """Inside, torch compiles extensions in `folder`."""
    name = "TORCH_EXTENSIONS_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _import_muon() -> None:
    """ZeRO-3 imports its Muon to see whether the optimizer is one. Three functions there, which nothing here calls, are
    decorated with torch.compile, whose import would take each process 3 s (one core of a server, 2026)."""
    from deepspeed.runtime import compiler  # pyright: ignore[reportMissingImports]

    with _deepspeed.replaced(compiler, "compile", lambda: _as_it_is), suppress(ImportError):  # older ones have no Muon
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@contextmanager
def _flattened_on(device: torch.device) -> Iterator[None]:
    """Makes ZeRO-3 lay a rank's parameters behind each other on the GPU. Its `defragment` copies them to host memory
    that is not page-locked, and back, so that they are not on the device twice: seconds for billions of parameters,
    each time a model is built. Twice the parameters is no more than a step holds of parameters and gradients."""
    if device.type != "cuda":
        yield
        return
    from deepspeed.runtime.zero import stage3  # pyright: ignore[reportMissingImports]

    with _deepspeed.replaced(stage3, "defragment", flattened):
        yield


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """A new tensor that has the elements of all `tensors`, which become views of it."""
    buffer = torch.cat([tensor.flatten() for tensor in tensors])
    for tensor, elements in zip(tensors, buffer.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data = elements
    timing.synchronise(buffer.device)
    torch.cuda.empty_cache()
    return buffer


@contextmanager
def _no_model_kept() -> Iterator[None]:
    """Frees the models that were trained inside. ZeRO-3 keeps each model that it wraps on a global list, and each that
    took two steps in a cache, with parameters and optimizer. They would take memory while a later training is measured.
    """
    from deepspeed.runtime.zero import (  # pyright: ignore[reportMissingImports]
        parameter_offload,
        partitioned_param_coordinator,
    )

    before = list(parameter_offload.FWD_MODULE_STACK)
    try:
        yield
    finally:
        parameter_offload.FWD_MODULE_STACK[:] = before
        for cache in _caches(partitioned_param_coordinator):
            cache.cache_clear()


def _caches(module: ModuleType) -> list[Any]:
    """The cached functions and methods of a module, which decorators may hide in their closures.

    They are not searched for among the garbage collector's objects: those that the worker has frozen, it does not list.
    """
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    left: list[Any] = [each for holder in (module, *classes) for each in vars(holder).values()]
    found: dict[int, Any] = {}
    seen: set[int] = set()
    while left:
        each = left.pop()
        if type(each) is CACHE and each.__module__ == module.__name__:
            found[id(each)] = each
        elif isinstance(each, FunctionType) and id(each) not in seen:
            seen.add(id(each))
            left += [cell.cell_contents for cell in each.__closure__ or ()]
    return list(found.values())


def make_optimizer(model: nn.Module, config: TrialConfig) -> torch.optim.Optimizer:
    """The optimizer of `train.make_optimizer`, which steps wherever DeepSpeed puts its fp32 parameters, or DeepSpeed's
    own Adam for host memory."""
    if config.engine.optimizer_offload != "deepspeed_cpu_adam":
        return train.make_optimizer(model.parameters(), config.workload)
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    options = {"betas": train.BETAS, "eps": train.EPS, "weight_decay": train.WEIGHT_DECAY, "adamw_mode": True}
    return DeepSpeedCPUAdam(model.parameters(), lr=config.workload.learning_rate, **options)


def initialise(parameters: Iterable[tuple[str, int, nn.Parameter]], seed: int) -> None:
    """Fill partitioned parameters with the initial values of our decoder.

    parameters: (name in our decoder, index in our decoder, parameter) of each.
    """
    from deepspeed.runtime.zero import GatheredParameters  # pyright: ignore[reportMissingImports]

    for name, index, parameter in parameters:
        with GatheredParameters(parameter, modifier_rank=0):  # rank 0's values are sent to all
            # drawn in fp32, as one process draws them, whatever dtype the parameter has
            whole = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            fill(whole, name, index, seed)
            parameter.data.copy_(whole)


def num_tiles(num_tokens: int, tile_tokens: int) -> int:
    """The number of equal tiles of at most `tile_tokens`. `torch.chunk` makes exactly as many. For another number it
    may make fewer, and DeepSpeed's tiled functions, which reduce a gradient at the last tile, would never reduce it."""
    return -(-num_tokens // tile_tokens)


def require_tile(option: str, asked: int, num_sequences: int, tile: Tensor) -> None:
    """
    tile: the hidden states [...,h] that a tiled function of DeepSpeed computes at a time.

    Raises:
        Incorrect: it has more than `asked` tokens of each sequence. Products and losses would be the same.
    """
    if (tokens := tile[..., 0].numel()) > num_sequences * asked:
        raise Incorrect(
            f"workload.{option}={asked}: DeepSpeed computed {tokens:,} tokens at a time, of {num_sequences} sequences; "
            "leave it out, or use engine=fsdp2"
        )


def tile_mlp(mlp: nn.Module, tile_tokens: int) -> None:
    """Make the MLP of a Hugging Face layer, x [B,s,h] -> [B,s,h], compute `tile_tokens` of the s tokens at a time, by
    DeepSpeed's `TiledMLP`. Its backward runs each tile's forward once more. Where it computes more tokens at a time,
    the forward raises Incorrect."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP  # pyright: ignore[reportMissingImports]

    forward, weights = mlp.forward, list(mlp.parameters())

    def tiled(x: Tensor) -> Tensor:
        # `of_tile` may not close over x: TiledMLP keeps the function until the backward, where a checkpoint drops x
        num_sequences, num_tokens, _ = x.shape

        def of_tile(_: nn.Module, tile: Tensor) -> Tensor:  # [B,t,h] in the forward, [B*t,h] in the backward
            require_tile("mlp_tile_tokens", tile_tokens, num_sequences, tile)
            return forward(tile)

        return TiledMLP.apply(of_tile, mlp, x, num_tiles(num_tokens, tile_tokens), weights)

    mlp.forward = tiled


def tag_phases(engine: Any) -> None:
    """Make the ledger attribute what `engine` sends to the phases backward and optimizer, whoever calls the engine."""

    def tagged(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with ledger.phase(phase):
                return function(*args, **kwargs)

        return inside

    engine.backward, engine.step = tagged(engine.backward, "backward"), tagged(engine.step, "optimizer")


def show(engine: Any, named: Mapping[str, nn.Parameter], watch: Watch | None) -> None:
    """Make `engine` show the gradients of a step to `watch`, if there is one, before it clips them.

    named: the parameters by their names in our decoder.
    """
    if watch is None:
        return
    step = engine.step

    @wraps(step)
    def shown(*args: Any, **kwargs: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            watch(parts(engine.optimizer, named))
        return step(*args, **kwargs)

    engine.step = shown


def parts(optimizer: Any, named: Mapping[str, nn.Parameter]) -> Iterator[Part]:
    """The gradients of the parameters, gathered one at a time. ZeRO-3 cuts each into equal parts, and lays a rank's
    parts of many parameters behind each other into one buffer, which the inner optimizer updates. What the last part
    has beyond the parameter is left out: its weights are whatever the memory held."""
    from deepspeed.utils import safe_get_full_grad, safe_get_local_grad  # pyright: ignore[reportMissingImports]

    for name, parameter in named.items():
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        whole, local = safe_get_full_grad(parameter), safe_get_local_grad(parameter).flatten()
        left = max(whole.numel() - dist.get_rank() * local.numel(), 0)
        yield Part(name, whole, local[:left], optimizer.fp32_partitioned_groups_flat[group], offset)


def grad_norm(engine: Any, device: torch.device) -> Tensor:
    """The norm of the whole gradient of the last step, before clipping. It stays on the device, unread."""
    return torch.as_tensor(engine.get_global_grad_norm(), device=device).detach()
