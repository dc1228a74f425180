"""DeepSpeed in a process whose process group is already there.

Importing it leaves its modules, its logger, and PYTORCH_NVML_BASED_CUDA_CHECK=1 in the environment.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@contextmanager
def told_of(group: "ProcessGroup") -> Iterator[None]:
    """As `connected`, with `group` as the sequence-parallel one."""
    # An exchange of uneven heads asks DeepSpeed's groups for this rank, which they learn from Megatron's mpu.
    with connected(SimpleNamespace(get_sequence_parallel_rank=group.rank)):
        yield


@contextmanager
def connected(mpu: Any) -> Iterator[ModuleType]:
    """DeepSpeed, its communication over the process group of torch, with the groups that `mpu` knows (None: one of all
    ranks). Its communication backend, its mpu and its list of usable ops are afterwards as they were."""
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.comm import comm  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

    with ExitStack() as restored:
        # On CPU it would first compile a shared-memory all-reduce, and then not send by the group.
        restored.enter_context(_replaced(deepspeed.ops, "__compatible_ops__", {}))
        restored.enter_context(_replaced(groups, "mpu", mpu))
        restored.enter_context(_replaced(comm, "cdb", None))
        deepspeed.init_distributed(verbose=False)
        yield deepspeed


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """`value` as the module's global `name`, which may be absent and then is so afterwards."""
    names = vars(module)
    before = {name: names[name]} if name in names else {}
    names[name] = value
    try:
        yield
    finally:
        del names[name]
        names.update(before)
