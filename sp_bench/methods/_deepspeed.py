"""DeepSpeed over torch's process group, which exists already in a trial's ranks.

Importing DeepSpeed leaves its modules and its logger in the process, and PYTORCH_NVML_BASED_CUDA_CHECK=1 in the
environment. All else that is changed here is restored.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@contextmanager
def told_of(group: "ProcessGroup") -> Iterator[None]:
    """Inside, DeepSpeed communicates over torch's process group and knows `group` as its sequence-parallel group.
    Restores what `connected` does."""
    # To exchange uneven heads DeepSpeed needs this rank's number in the group. It asks an mpu, an object of the form of
    # Megatron's model-parallel unit.
    with connected(SimpleNamespace(get_sequence_parallel_rank=group.rank)):
        yield


@contextmanager
def connected(mpu: Any) -> Iterator[ModuleType]:
    """Yields the deepspeed module, which inside communicates over torch's process group.

    mpu: an object of the form of Megatron's model-parallel unit, which tells DeepSpeed its groups. None: one group of
    all ranks.

    Restores DeepSpeed's communication backend, its mpu and its list of usable ops.
    """
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.comm import comm  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

    with ExitStack() as restored:
        # Otherwise, on CPU, it would compile an all-reduce over shared memory, and send by that and not by the group.
        restored.enter_context(replaced(deepspeed.ops, "__compatible_ops__", {}))
        restored.enter_context(replaced(groups, "mpu", mpu))
        restored.enter_context(replaced(comm, "cdb", None))
        deepspeed.init_distributed(verbose=False)
        yield deepspeed


@contextmanager
def replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Inside, the module's global `name` is `value`. Restores it, or removes it if the module had none."""
    names = vars(module)
    before = {name: names[name]} if name in names else {}
    names[name] = value
    try:
        yield
    finally:
        del names[name]
        names.update(before)
