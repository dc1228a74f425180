"""Examines this machine: its libraries, which kernels and methods run here or why not, and how fast its fabrics are."""

import json
import os
import socket
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from sp_bench import hardware, kernels, programs
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.message_sizes import transport_name
from sp_bench.driver.progress import console
from sp_bench.driver.ranks import with_source
from sp_bench.look.methods_table import Support, all_methods
from sp_bench.planning import identity
from sp_bench.planning.overrides import THIS_DEVICE
from sp_bench.rows import store

SLOW_S = 1.0  # a slower look-up of the machine's own name is reported

# In a separate process, since the driver imports no torch.
_PROBE = """
import json, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version() if cuda else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None,
    "backends": [b for b in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{b}_available")()],
    "cuda_devices": torch.cuda.device_count(),
}))
"""


def probe_torch() -> dict[str, Any]:
    """Torch's version and devices, or `error`: the last line of its import error."""
    try:
        printed = programs.answer([sys.executable, "-P", "-c", _PROBE], limit_s=300, variables=with_source(os.environ))
    except programs.NoAnswer as error:
        return {"error": str(error)}
    return json.loads(printed.splitlines()[-1])


def kernel_support(device: str) -> dict[str, str | None]:
    """Kernel -> why it does not run on `device`, or None; for bfloat16 and 32/8 heads of 128."""
    shape = AttentionShape(1, 8192, 32, 8, 128, True, "bfloat16")
    return {name: kernels.get(name).unsupported_reason(shape, device) for name in kernels.names()}


def method_support(supported: Support, usable_kernels: Collection[str]) -> str:
    """Whether a method runs here with any of these kernels, in words, or why not."""
    runs_on = [name for name in supported.kernels if name in usable_kernels]
    return supported.missing_library or (
        f"usable on {', '.join(runs_on)}" if runs_on else f"takes {', '.join(supported.kernels)}; none is usable here"
    )


def examine() -> dict[str, Any]:
    """Heading -> name -> what was found, or why it does not work. JSON-ready."""
    found, versions = hardware.gpus(), hardware.package_versions()
    sections: dict[str, Any] = {
        "machine": {
            "cpu": hardware.cpu_model(),
            "gpus": _gpu_text(found),
            "driver": found.driver if found else "none",
            "host name": host_name(),
        },
        "torch": probe_torch(),
        "libraries": {name: versions.get(name, "not installed") for name in hardware.PACKAGES},
    }
    usable: set[str] = set()
    for device in ("cpu", "cuda"):
        absent = "no CUDA device here" if device == "cuda" and not (found and found.devices) else None
        reasons = {name: absent or reason for name, reason in kernel_support(device).items()}
        sections[f"kernels on {device}"] = {name: reason or "usable" for name, reason in reasons.items()}
        usable.update(name for name, reason in reasons.items() if not reason)
    sections["methods"] = {f"{s.name} {s.variant or ''}".strip(): method_support(s, usable) for s in all_methods()[0]}
    return sections


def show() -> None:
    for heading, pairs in examine().items():
        more = " (sp-bench methods says which heads over how many ranks)" if heading == "methods" else ""
        console().print(f"[bold]{heading}[/]{more}")
        _pairs(pairs)


def host_name() -> str:
    """The name of this machine, and the address that gloo finds for it."""
    name, start = socket.gethostname(), time.monotonic()
    try:
        found = f"is {socket.gethostbyname(name)}"
    except OSError:
        found = "does not resolve; ranks meet at 127.0.0.1, and gloo uses the loopback device"
    waited_s = time.monotonic() - start
    slow = f", found after {waited_s:.0f} s: a line for it in /etc/hosts makes it quick" if waited_s > SLOW_S else ""
    return f"{name} {found}{slow}"


def _gpu_text(found: hardware.Gpus | None) -> str:
    if not found or not found.devices:
        return (found and found.problem) or "none"
    return ", ".join(f"{i}: {gpu.name}" for i, gpu in enumerate(found.devices))


def _pairs(pairs: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(min_width=18)
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(f"  {name}", Text(str(value)))
    console().print(table)


def fabrics_here() -> list[str]:
    """Overrides for sweep=fabrics on this machine: NCCL on 2, 4, 8 ... of its GPUs, or gloo without two GPUs."""
    found = hardware.gpus()
    num_gpus = len(found.devices) if found else 0
    if not found or num_gpus < 2:
        gloo = ("fabric=gloo", "hardware=cpu", "dtype=float32", "sp_size=2", "workload.timed_steps=10")
        return ["sweep=fabrics", *gloo, "workload.max_message_bytes=16777216"]
    sizes = [2**power for power in range(1, num_gpus.bit_length())]
    return ["sweep=fabrics", f"hardware={THIS_DEVICE}", f"sp_size={','.join(map(str, sizes))}"]


CURVE_COLUMNS = (
    *("core_id", "fabric", "primitive", "exchange", "sp_size", "dtype", "status", "reason", "started_at"),
    *("curve", "latency_us", "bandwidth_bytes_per_s", "workload"),
)


def show_curves(folder: Path) -> None:
    """Print a line per curve of a campaign that was measured on this machine with this code."""
    rows = store.read(folder, CURVE_COLUMNS)[0].to_pylist() if folder.is_dir() else []
    here = {identity.core_id(device) for device in ("cpu", "cuda")}
    rows = [row for row in rows if row["workload"] == "collective" and row["core_id"] in here]
    table = Table(box=None, pad_edge=False)
    for heading in ("fabric", "primitive", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ranks", "latency (us)", "bandwidth (GiB/s)", "largest (MiB)", "at the largest (GiB/s)"):
        table.add_column(heading, justify="right")
    table.add_column("status", overflow="fold")
    for row in sorted(rows, key=lambda r: (r["fabric"], r["primitive"], r["exchange"], r["sp_size"], r["started_at"])):
        primitive = transport_name(row["primitive"], row["exchange"])
        table.add_row(row["fabric"], primitive, row["dtype"], str(row["sp_size"]), *_curve_cells(row))
    console().print(table)


def _curve_cells(row: dict[str, Any]) -> list[str | Text]:
    """The cells of a curve's line. Bytes are those that one rank sends off-rank. A dash means unknown."""
    if row["status"] != "ok":
        return ["-", "-", "-", "-", Text(f"{row['status']}: {row['reason']}")]
    latency, bandwidth, largest = row["latency_us"], row["bandwidth_bytes_per_s"], row["curve"][-1]
    return [
        "-" if latency is None else f"{latency:.1f}",
        "-" if bandwidth is None else f"{bandwidth / 2**30:.2f}",
        f"{largest['message_bytes'] / 2**20:.2f}",
        f"{1e3 * largest['message_bytes'] / largest['ms'] / 2**30:.2f}",
        "ok",
    ]
