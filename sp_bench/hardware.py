"""What this machine is: peak rates with their source, and the environment that a row records. No torch."""

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml

from sp_bench import programs

PACKAGE = Path(__file__).parent

# Dense FLOP/s by device-name pattern and dtype; the first match counts. fp32 is without TF32.
PEAK_FLOPS: tuple[tuple[str, Mapping[str, float]], ...] = (
    # NVIDIA H100 and H200 datasheets, SXM: 1,979 TFLOP/s with sparsity, so 989.4 dense; FP8 3,958, so 1,979; fp32 66.9.
    (
        r"H100 (80GB HBM3|SXM)|H200(?! NVL)",
        {"bfloat16": 989.4e12, "float16": 989.4e12, "float8": 1979e12, "float32": 66.9e12},
    ),
    # NVIDIA HGX B200 (1,000 W) datasheet: 4,500 TFLOP/s with sparsity, so 2,250 dense; FP8 9,000, so 4,500; its fp32
    # differs by edition.
    (r"(?<!G)B200", {"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12}),
    # NVIDIA A100 datasheet: 312 dense, fp32 19.5.
    (r"A100", {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}),
)

# GiB of a device, by device-name pattern: the total capacity that CUDA names where rows ran out of memory.
DEVICE_GIB: tuple[tuple[str, float], ...] = ((r"H100 (80GB HBM3|SXM)", 79.2), (r"(?<!G)H200(?! NVL)", 139.8))

# The packages whose code can change a measurement.
PACKAGES = (
    "torch",
    "numpy",
    "triton",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "fla-core",  # kernels of flash-linear-attention
    "tilelang",  # it replaces one of them on Hopper
    "ring-flash-attn",
    "yunchang",
    "deepspeed",
    "megatron-core",
    "liger-kernel",
    "transformers",
    "accelerate",
    "trl",
    "datasets",
    "transformer-engine",
    "nvidia-cutlass-dsl",  # compiles FlashAttention-4
    "xformers",  # brings FlashAttention-3
    "torchao",
)

RECORDED_VARIABLES = re.compile(
    r"NCCL_\w+|NVTE_\w+|TORCH_NCCL_\w+|TORCH_DIST_\w+|GLOO_\w+|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_MAX_CONNECTIONS"
    r"|PYTORCH_CUDA_ALLOC_CONF|PYTORCH_ALLOC_CONF|FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED|FLA_\w+"
)
# Of these, what is recorded with its value: numbers and words of the libraries. Others may hold a host, a path or a
# secret, and a hash of the value is recorded.
OF_PUBLIC_VALUES = re.compile(
    r"NCCL_(ALGO|PROTO|NET|NVLS_ENABLE|VERSION|DEBUG|DEBUG_SUBSYS|BUFFSIZE|NTHREADS|NSOCKS_PERTHREAD|SOCKET_NTHREADS"
    r"|(MIN|MAX)_(P2P_)?NCHANNELS|(MIN|MAX)_CTAS|NCHANNELS_PER_(NET_)?PEER|CGA_CLUSTER_SIZE|CROSS_NIC|LAUNCH_MODE"
    r"|P2P_(DISABLE|LEVEL|DIRECT_DISABLE|NET_CHUNKSIZE|NVL_CHUNKSIZE)|SHM_(DISABLE|USE_CUDA_MEMCPY)|PXN_DISABLE"
    r"|NET_(GDR_LEVEL|GDR_READ|GDR_C2C|SHARED_BUFFERS)|IB_(DISABLE|TIMEOUT|RETRY_CNT|GID_INDEX|SL|TC|QPS_PER_CONNECTION"
    r"|SPLIT_DATA_ON_QPS|PCI_RELAXED_ORDERING|ADAPTIVE_ROUTING|CUDA_SUPPORT|AR_THRESHOLD)|CUMEM(_HOST)?_ENABLE"
    r"|COLLNET_ENABLE|DMABUF_ENABLE|(GRAPH|LOCAL)_REGISTER|GRAPH_MIXING_SUPPORT|WIN_ENABLE|IGNORE_CPU_AFFINITY"
    r"|BLOCKING_WAIT|ASYNC_ERROR_HANDLING|DESYNC_DEBUG)"
    r"|TORCH_NCCL_(ASYNC_ERROR_HANDLING|BLOCKING_WAIT|AVOID_RECORD_STREAMS|HIGH_PRIORITY|CUDA_EVENT_CACHE|DESYNC_DEBUG"
    r"|DUMP_ON_TIMEOUT|ENABLE_MONITORING|ENABLE_TIMING|HEARTBEAT_TIMEOUT_SEC|TRACE_BUFFER_SIZE|NAN_CHECK"
    r"|USE_COMM_NONBLOCKING|USE_TENSOR_REGISTER_ALLOCATOR_HOOK)|TORCH_DIST_INIT_BARRIER"
    r"|NVTE_(FRAMEWORK|(FLASH|FUSED|UNFUSED)_ATTN(_V\d)?|FUSED_ATTN_BACKEND|ALLOW_NONDETERMINISTIC_ALGO|DEBUG|DEBUG_LEVEL"
    r"|TORCH_COMPILE|BATCH_MHA_P2P_COMM)"
    r"|OMP_\w+|CUDA_\w+|PYTORCH_\w+|FLASH_ATTENTION_\w+|FLA_(TILELANG|FLASH_QLA|USE_\w+|TRIL_PRECISION|CACHE_MODE)"
)
# Of the recorded ones, what changes how messages travel, or how torch allocates
OF_TRANSPORT_AND_MEMORY = re.compile(r"NCCL_(?!DEBUG)\w+|PYTORCH_(CUDA_)?ALLOC_CONF")


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak FLOP/s of one device, or None where no source is at hand: MFU is then null, never a guess."""
    for pattern, rates in PEAK_FLOPS:
        if re.search(pattern, device_name):
            return rates.get(dtype)
    return None


def device_bytes(device_name: str) -> int | None:
    """Memory of one device that is not here, or None where no row says it."""
    return next((round(gib * 2**30) for pattern, gib in DEVICE_GIB if re.search(pattern, device_name)), None)


class Gpu(NamedTuple):
    name: str
    uuid: str
    memory_bytes: int = 0  # 0: the driver does not tell, as of memory that it shares with the processors
    capability: tuple[int, int] | None = None  # CUDA's compute capability: (9, 0) is Hopper
    is_sliced: bool = False  # in MIG mode, in which programs get slices of it and never the whole


class Gpus(NamedTuple):
    driver: str
    devices: tuple[Gpu, ...]
    problem: str = ""  # why there are no devices although there is a driver, and the way out


_NO_DRIVER = tuple(
    pynvml.nvmlExceptionClass(code)
    for code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
)


# What helps after an error of NVML
_WAYS_OUT = {
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "reboot, or reload the driver",
    pynvml.NVML_ERROR_NO_PERMISSION: "ask for access to the devices",
    pynvml.NVML_ERROR_GPU_IS_LOST: "reset the GPU or reboot",
}


@contextmanager
def _nvml() -> Iterator[None]:
    """A session of NVML.

    Raises:
        NVMLError: it does not answer.
    """
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def gpus() -> Gpus | None:
    """The driver and the devices that CUDA_VISIBLE_DEVICES leaves, by NVML; None without an NVIDIA driver. The order is
    that of the PCI bus, which the ranks have too."""
    try:
        with _nvml():
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            found = [
                Gpu(
                    pynvml.nvmlDeviceGetName(each),
                    pynvml.nvmlDeviceGetUUID(each),
                    _memory_bytes(each),
                    pynvml.nvmlDeviceGetCudaComputeCapability(each),
                    _is_sliced(each),
                )
                for each in handles
            ]
            driver = pynvml.nvmlSystemGetDriverVersion()
    except _NO_DRIVER:
        return None
    except pynvml.NVMLError as error:
        way_out = _WAYS_OUT.get(getattr(error, "value", 0), "nvidia-smi may say more")
        return Gpus("unknown", (), f"the NVIDIA driver does not answer (NVML: {error}); {way_out}")
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = found if wanted is None else visible(found, wanted)
    sliced = [f"{gpu.uuid} is in MIG mode" for gpu in devices if gpu.is_sliced]
    if wanted is not None and "MIG-" in wanted:
        sliced = ["CUDA_VISIBLE_DEVICES names a MIG slice"]
    if sliced:
        way_out = "name whole GPUs by UUID in CUDA_VISIBLE_DEVICES, or end the mode (nvidia-smi -i UUID -mig 0)"
        return Gpus(driver, (), f"{sliced[0]}, and sp_bench does not measure slices; {way_out}")
    return Gpus(driver, tuple(devices))


def _memory_bytes(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return 0


def _is_sliced(handle: Any) -> bool:
    try:
        return pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # a device or a driver that has no such mode
        return False


def processes_on_gpus(num_gpus: int) -> list[set[int]]:
    """The ids of the processes that compute on each of the first visible devices, as the driver numbers them; empty if
    NVML does not answer."""
    found = gpus()
    try:
        with _nvml():
            return [_processes_on(gpu.uuid) for gpu in (found.devices[:num_gpus] if found else ())]
    except pynvml.NVMLError:
        return []


def _processes_on(uuid: str) -> set[int]:
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return set()
    return {process.pid for process in running}


def describes(kind: str, model: str) -> bool:
    """Whether the file `kind` of conf/hardware is of devices of that name: h200 of NVIDIA H200, not of NVIDIA GH200."""
    return re.search(rf"(^|_){re.escape(kind)}(_|$)", short_name(model)) is not None


def short_name(model: str) -> str:
    """A device's name as a file of conf/hardware could have it: nvidia_rtx_6000_ada_generation."""
    return re.sub("[^a-z0-9]+", "_", model.lower()).strip("_")


def visible(devices: list[Gpu], wanted: str) -> list[Gpu]:
    """The devices that CUDA shows with CUDA_VISIBLE_DEVICES=`wanted`: an entry that names no device hides itself and
    all that follow, and one that is repeated hides all."""
    shown_devices: list[Gpu] = []
    for item in filter(None, (part.strip() for part in wanted.split(","))):
        index = int(item) if item.isdecimal() else None
        match = [d for i, d in enumerate(devices) if i == index or (index is None and d.uuid.startswith(item))]
        if not match:
            break
        if match[0] in shown_devices:
            return []
        shown_devices += match[:1]
    return shown_devices


def cpu_model() -> str:
    """The processor's name, or its architecture where the kernel does not tell."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return match[1].strip() if match else platform.machine()


def device_model(device: str) -> str:
    """What a trial on `device` (cpu or cuda) runs on. `none`: no such device here."""
    if device == "cpu":
        return cpu_model()
    found = gpus()
    return ", ".join(sorted({gpu.name for gpu in found.devices})) if found and found.devices else "none"


def host_bytes() -> int:
    """The memory of this machine with its swap, or what this process's cgroup may use of it."""
    limits = [psutil.virtual_memory().total + psutil.swap_memory().total]
    for path in cgroup_files("memory.limit_in_bytes", "memory.max"):
        if path.exists() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def free_host_bytes() -> int:
    """How much of `host_bytes` no process uses yet, and could be allocated now."""
    free = [psutil.virtual_memory().available]
    limits = cgroup_files("memory.limit_in_bytes", "memory.max")
    usages = cgroup_files("memory.usage_in_bytes", "memory.current")
    for limit, usage in zip(limits, usages, strict=True):
        if limit.exists() and usage.exists() and (text := limit.read_text().strip()).isdigit():
            free.append(int(text) - int(usage.read_text()) + _cached_bytes(usage.parent))
    return max(min(free), 0)


def _cached_bytes(cgroup: Path) -> int:
    """Bytes of a cgroup's usage that are cached files, which the kernel drops when memory runs short."""
    path = cgroup / "memory.stat"
    lines = path.read_text().splitlines() if path.exists() else []
    found = dict(line.split() for line in lines)
    return int(found.get("total_inactive_file", found.get("inactive_file", 0)))


def cgroup_files(first: str, second: str) -> list[Path]:
    """Where this process's memory cgroup may have a control file: `first` by version 1, `second` by version 2, and in
    each the file at the top, which is the process's own inside a container. Not all of them exist."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    root = Path("/sys/fs/cgroup")
    places = [(root / "memory", groups.get("memory"), first), (root, groups.get(""), second)]
    found = [(top, (group.strip("/"), ""), name) for top, group, name in places if group is not None]
    return [top / folder / name for top, folders, name in found for folder in folders]


@cache
def package_versions() -> dict[str, str]:
    """Installed versions of the packages that can change a measurement."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


_assumed_installed: ContextVar[bool] = ContextVar("assumed_installed", default=False)


@contextmanager
def as_if_installed() -> Iterator[None]:
    """Methods, kernels and engines say what their libraries could do, were they here."""
    token = _assumed_installed.set(True)
    try:
        yield
    finally:
        _assumed_installed.reset(token)


def is_assumed_installed() -> bool:
    return _assumed_installed.get()


def missing_packages(*names: str) -> list[str]:
    """Those that are not installed here; none within `as_if_installed`."""
    return [] if is_assumed_installed() else [name for name in names if name not in package_versions()]


def topology() -> str | None:
    """The link matrix between the GPUs, as nvidia-smi prints it; None if it does not answer."""
    try:
        matrix = programs.answer(["nvidia-smi", "topo", "-m"]).strip()
    except programs.NoAnswer:
        return None
    return re.sub(r"\x1b\[[0-9;]*m", "", matrix) or None  # it underlines its heading


def recorded_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that shape a measurement, as `public_value` has them; no other variable is ever recorded."""
    named = {name: value for name, value in sorted(variables.items()) if RECORDED_VARIABLES.fullmatch(name)}
    return {name: public_value(name, value) for name, value in named.items()}


def public_value(name: str, value: str) -> str:
    """What rows and pages have of a variable: its value, or `sha256:` and 8 hex digits, which say whether two are
    equal. A value that is such a hash already stays."""
    if OF_PUBLIC_VALUES.fullmatch(name) or re.fullmatch("sha256:[0-9a-f]{8}", value):
        return value
    return f"sha256:{hashlib.sha256(os.fsencode(value)).hexdigest()[:8]}"


def environment(device: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """What the `environment` column can hold without torch, for rows of trials that gave no record."""
    found = gpus() if device == "cuda" else None
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "cpu": cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "device_names": [gpu.name for gpu in found.devices] if found else [],
        "device_uuids": [gpu.uuid for gpu in found.devices] if found else [],
        "driver": found.driver if found else None,
        "env": recorded_variables(variables),
    }
