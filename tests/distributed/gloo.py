"""Runs a function on real gloo ranks. Starting a group costs seconds: start one a world size, run many cases in it."""

import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, world_size: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # peers may wait in a collective: leave at once, the parent ends them
    dist.destroy_process_group()


def run(world_size: int, function: Callable[..., None], *args: Any) -> None:
    """`function(rank, *args)` in `world_size` fresh processes with an initialised gloo group.

    Raises:
        ProcessExitedException, ProcessRaisedException: a rank failed; its traceback is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world_size, os.path.join(folder, "store"), function, args), nprocs=world_size)
