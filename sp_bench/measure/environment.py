"""What a trial ran on: what hardware.py finds without torch, and what only torch and the process group know."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed.distributed_c10d import _get_default_group

from sp_bench import hardware


def device_name(device: torch.device) -> str | None:
    """The GPU's name, by which its peak rates are known; None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def capture(device: torch.device) -> dict[str, Any]:
    """The row's `environment`. Every rank of the world calls it, since each names the device that it used."""
    cuda = device.type == "cuda"
    mine = (device_name(device), f"GPU-{torch.cuda.get_device_properties(device).uuid}") if cuda else None
    used: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(used, mine)
    return hardware.environment(device.type, os.environ) | {
        "device_names": [device[0] for device in used if device],
        "device_uuids": [device[1] for device in used if device],
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
        "process_group": type(_get_default_group()._get_backend(device)).__name__,
        "topology": hardware.topology() if cuda else None,
    }
