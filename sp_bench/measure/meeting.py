"""How the ranks of a launch meet."""

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from sp_bench import handover
from sp_bench.config.trial import TrialConfig


def meet(config: TrialConfig, device: torch.device) -> None:
    """Make the group of all ranks, which meet at MASTER_ADDR:MASTER_PORT."""
    if handover.LISTEN_FD in os.environ:  # rank 0, if whoever started it listens at that port already
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # init_process_group finds this server by its port, because both are multi-tenant, and keeps it
        server = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=int(os.environ.pop(handover.LISTEN_FD)),
        )
        assert server.port == port
    dist.init_process_group(config.fabric.backend, device_id=device if device.type == "cuda" else None)
