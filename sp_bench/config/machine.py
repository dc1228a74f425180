"""Options of the machine: transport, devices, and the links that a world of one rank imagines."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from sp_bench.config.declared import Declared
from sp_bench.config.parsing import ConfigError, require_positive, shown


@dataclass(frozen=True)
class FabricConfig:
    """The backend of the process group and the environment variables that shape its transport."""

    name: Annotated[
        str,
        Declared(
            "transport of the process group",
            column="fabric",
            words={
                "nvlink": "NVLink",
                "channels_2": "2 NCCL channels",
                "channels_1": "1 NCCL channel",
                "shm": "host memory",
                "socket": "TCP sockets",
                "network": "NVLink and the network",
                "gloo": "gloo",
            },
        ),
    ]
    backend: Annotated[Literal["gloo", "nccl"], Declared("of the process group: gloo | nccl", column=None)]
    env: Annotated[Mapping[str, str], Declared("environment variables that shape the transport", column=None)] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class HardwareConfig:
    """The kind of device."""

    name: Annotated[str, Declared("kind of device asked for", column="hardware")]
    device: Annotated[Literal["cpu", "cuda"], Declared("cpu | cuda", column=None)]
    device_memory_gib: Annotated[
        float | None,
        Declared(
            "emulated size of a smaller device; null: the whole device",
            unit="GiB",
            words="capped at {:g} GiB",
            identifier="capped at {:g} GiB a device",
        ),
    ] = None
    threads_per_rank: Annotated[
        int | None, Declared("processor threads of a rank; null: 1 of several ranks, all cores of one", column=None)
    ] = None
    allocator: Annotated[
        Literal["expandable_segments"] | None,
        Declared(
            "cuda: expandable_segments of torch's allocator, against fragmentation; null: as the shell says",
            head="allocator",
        ),
    ] = None
    ranks_per_gpu: Annotated[
        int,
        Declared(
            "cuda: above 1, ranks share a GPU, for proofs, bytes and memory; such a row has no time; null in old "
            "rows, which had 1",
            unit="ranks",
            old_rows=1,
            omitted=True,
            words="{} ranks share a GPU",
            identifier="{} ranks share a GPU",
        ),
    ] = 1

    def __post_init__(self) -> None:
        require_positive(self, "device_memory_gib", "threads_per_rank", "ranks_per_gpu")
        if self.ranks_per_gpu > 1 and self.device == "cpu":
            raise ConfigError(f"hardware.ranks_per_gpu={self.ranks_per_gpu} is of CUDA devices; leave it out")
        if self.allocator is not None and self.device == "cpu":
            raise ConfigError(f"hardware.allocator={self.allocator} is of torch's allocator on CUDA; leave it out")


NO_DELAY = "none"


@dataclass(frozen=True)
class LinkConfig:
    """How long messages take in a world of one rank: curves of time over size, by collective and size of its group. The
    text of a curve is `bytes:us bytes:us ...`, bytes that one rank sends off-rank. costs/links.py reads it."""

    name: Annotated[
        str,
        Declared(
            "world=one_rank: what says how long messages take, a file of conf/link; none: they are copies alone",
            column="link",
            old_rows=NO_DELAY,
            words={
                "nvlink": "NVLink",
                "nodes_400g": "400 Gbit/s a GPU",
                "nodes_400g_short": "400 Gbit/s a GPU, short messages too",
                "nodes_200g": "200 Gbit/s a GPU",
            },
        ),
    ] = NO_DELAY
    inside: Annotated[Mapping[str, str], Declared("of a host: `collective ranks` -> curve", column=None)] = field(
        default_factory=dict
    )
    between: Annotated[
        Mapping[str, str],
        Declared("`collective hosts` -> curve of what one network card carries; empty: of one host only", column=None),
    ] = field(default_factory=dict)


def require_link_file(path: Path | None) -> Path | None:
    """`path` as it is.

    Raises:
        ConfigError: `link=` cannot have its name.
    """
    if path is not None and not re.fullmatch(r"[a-z0-9_]+", path.stem):
        raise ConfigError(f"--link {shown(path)}: link={path.stem} would name it; use lower-case letters, digits and _")
    return path
