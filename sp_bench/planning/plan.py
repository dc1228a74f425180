"""From trial configs to trials: identity, validity and order. Pure; no torch, no files, no processes."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from sp_bench import hardware, kernels, methods
from sp_bench.config.documents import MULTIPLE
from sp_bench.config.options import canonical
from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import TRAINING
from sp_bench.costs import links, memory, message_sizes, patterns
from sp_bench.costs.training import loss_gradients
from sp_bench.engines import requirements
from sp_bench.methods import closed_forms, real_rank, refusals
from sp_bench.planning.device_time import BEST_SHARE, peak_device, step_s
from sp_bench.rows import names
from sp_bench.rows.row import Resolved

MAX_TRIALS = 100_000  # of one plan: above that an override is a slip
SPARE_S = 120.0  # what a single step's deadline must leave beside its predicted time
MAX_CPU_RANKS = 512  # processes of one trial on the CPU of this machine


@dataclass(frozen=True)
class Trial:
    """One multi-process job to run, or the reason why it cannot be run."""

    config: TrialConfig
    cell_id: str  # 12 hex digits, equal for the replicates of a cell
    trial_id: str  # 12 hex digits, of cell and replicate
    replicate: int
    order_index: int
    unsupported_reason: str | None


def cell_id(config: TrialConfig) -> str:
    return names.cell_id(canonical(config))


def unsupported_reason(
    config: TrialConfig, num_gpus: int | None, host_bytes: int | None = None, num_hosts: int | None = 1
) -> str | None:
    """Why this trial cannot run and what would work; None if it can run.

    num_gpus: CUDA devices of a host; None without an NVIDIA driver.
    host_bytes: memory of a host; None: not checked.
    num_hosts: hosts of this run; None: as many as the trial needs.

    Raises:
        ConfigError: options of the method that no shape could make valid.
    """
    method, layout = methods.get(config.method.name), methods.layout_of(config)
    methods.primitive(config.method)
    if reason := hosts_reason(config, num_hosts) or _sharing_reason(config) or _peer_access_reason(config):
        return reason
    if reason := _graph_reason(config) or _one_rank_reason(config):
        return reason
    if config.workload.name == "collective":  # no attention: heads, seq_len and kernel do not matter
        return message_sizes.unsupported_reason(config) or _missing_devices(config, num_gpus)
    if reason := refusals.conversion_reason(config.method, config.kinds):
        return reason
    for kind in config.kinds:
        shape = config.attention_shape(config.seq_len, kind)
        of_kind, kernel = config.method_of(kind), config.kernel_of(kind)
        if reason := refusals.reason(of_kind, kernel, shape, config.sp_size):
            return reason
        if reason := kernels.delta_reason(kernel, shape) or kernels.window_reason(kernel, shape):
            return reason
        if kind == "delta" and (reason := kernels.get(kernel).unsupported_reason(shape, config.hardware.device)):
            return reason
    shape = config.attention_shape(config.seq_len)
    library_packs = config.kernel.name in getattr(method, "OWN_PACKED_KERNELS", ())
    if not library_packs and (reason := kernels.packing_reason(config.kernel.name, shape)):
        return reason
    # training pads whole sequences; attention pads documents that are cut one by one
    pads = not shape.documents if config.workload.name != "attention" else layout.kind == "document_zigzag"
    if config.workload.name != "attention" and (reason := requirements.unsupported_reason(config)):
        return reason
    if not pads and (reason := layout.unsupported_reason(config.seq_len, MULTIPLE if shape.documents else 1)):
        return reason
    if config.workload.name != "attention":
        shape = config.attention_shape(layout.padded(config.seq_len))
    kernel = kernels.get(config.kernel.name)
    return (
        kernel.unsupported_reason(shape, config.hardware.device)
        or _missing_devices(config, num_gpus)
        or _missing_memory(config, host_bytes)
    )


def reason_anywhere(config: TrialConfig, measure_s: float = math.inf, warmup_s: float = math.inf) -> str | None:
    """Why no machine could run the trial, even with the GPUs, hosts, memory and packages that it needs; None if one
    could.

    Raises:
        ConfigError: as `unsupported_reason`.
    """
    with hardware.as_if_installed():
        reason = unsupported_reason(config, num_gpus=config.gpus_per_node, num_hosts=None)
        return reason or _too_long_reason(config, None, measure_s, warmup_s)


def resolve(config: TrialConfig) -> Resolved:
    """The columns that follow from the config, its method and its engine without running it."""
    method, layout, workload = methods.get(config.method.name), methods.layout_of(config), config.workload.name
    dkv_dtype = patterns.dkv_dtype(config.method.name, config.method.variant, layout.ring_degree)
    attention = config.attention_shape(config.seq_len).seq_len  # attention pads packed documents only
    lengths = {"attention": attention, "collective": None}
    rings = None if workload == "collective" else methods.ring_degrees(config.method, config.sp_size)
    inner, outer = rings or (None, None)
    return Resolved(
        implementation=method.IMPLEMENTATION,
        primitive=methods.primitive(config.method),
        dkv_dtype=None if workload == "collective" else config.method.dkv_dtype or dkv_dtype,
        ulysses_degree=layout.ulysses_degree,
        ring_degree=layout.ring_degree,
        inner_ring_degree=inner,
        outer_ring_degree=outer,
        padded_seq_len=lengths.get(workload, layout.padded(config.seq_len)),
        engine_implementation=requirements.implementation(config.engine) if workload in TRAINING else None,
        batch_loading=requirements.batch_loading(config.engine) if workload in TRAINING else None,
        loss_gradients=loss_gradients(config),
        ran_rank=real_rank.real_place(config),
    )


def hosts_reason(config: TrialConfig, num_hosts: int | None) -> str | None:
    """Why the ranks cannot be on `num_nodes` hosts. num_hosts: hosts of this run; None: as many as the trial needs."""
    if config.num_nodes == 1:
        return None
    if config.world_size % config.num_nodes:
        valid = ", ".join(str(n) for n in range(1, config.world_size + 1) if config.world_size % n == 0)
        return f"num_nodes={config.num_nodes} does not divide {config.world_size} ranks; use one of {valid}"
    if num_hosts is not None and num_hosts < config.num_hosts:
        return (
            f"num_nodes={config.num_nodes} needs {config.num_nodes} hosts, and this run has {num_hosts}: start it in a "
            f"Slurm job of {config.num_nodes} nodes (sp-bench submit), or by torchrun --nnodes={config.num_nodes} "
            "(docs/CLUSTER.md)"
        )
    return None


def _sharing_reason(config: TrialConfig) -> str | None:
    """NCCL takes two ranks of one GPU only where it believes them on two hosts, and then sends by the network."""
    ranks, fabric = config.hardware.ranks_per_gpu, config.fabric
    if ranks == 1:
        return None
    option = f"hardware.ranks_per_gpu={ranks}"
    if fabric.env.get("NCCL_NET") != "Socket":
        return f"{option}: ranks of one GPU meet by sockets, not over fabric={fabric.name}; use fabric=socket"
    if config.num_nodes > 1:
        return f"{option} is for one host, not for num_nodes={config.num_nodes}; use ranks_per_gpu=1"
    if config.workload.name == "collective":
        return f"{option} leaves no times, and workload=collective has nothing else; use ranks_per_gpu=1"
    return None


def _peer_access_reason(config: TrialConfig) -> str | None:
    """Copy engines move data from GPU to GPU whatever NCCL does, so rows must not name another fabric."""
    if config.method.exchange == "copy_engines" and config.num_nodes > 1:
        return (
            f"method.exchange=copy_engines goes from GPU to GPU of one host, not to num_nodes={config.num_nodes}; use "
            "method.exchange=collectives, or num_nodes=1"
        )
    fabric = config.fabric
    limits = fabric.env.keys() & {"NCCL_P2P_DISABLE", "NCCL_MAX_NCHANNELS"}
    if config.method.exchange != "copy_engines" or (fabric.backend == "nccl" and not limits):
        return None
    return (
        f"method.exchange=copy_engines goes from GPU to GPU by peer access, not over fabric={fabric.name}; "
        "use fabric=nvlink, or method.exchange=collectives"
    )


def _graph_reason(config: TrialConfig) -> str | None:
    """Why a CUDA graph cannot hold the step safely, or None."""
    if config.workload.launch != "cuda_graph":
        return None
    if config.fabric.backend != "nccl":
        return (
            f"workload.launch=cuda_graph needs CUDA devices and NCCL, not fabric={config.fabric.name}; use "
            "fabric=nvlink with hardware=h200 or h100, or workload.launch=eager"
        )
    if config.method.exchange == "copy_engines":
        return (  # three messages of one size: the last of a replay and the first of the next would share a buffer
            "method.exchange=copy_engines fills its buffers in turn, which a replay does not; use "
            "workload.launch=eager, or method.exchange=collectives"
        )
    return None


ONE_RANK_ENGINES = ("fsdp2", "deepspeed", "hf_fsdp2", "hf_deepspeed", "hf_trainer", "trl_sft")
ONE_RANK_LIBRARIES = (
    *("deepspeed_ulysses", "deepspeed_ulysses_hf", "ring_flash_attn", "ring_flash_attn_llama3", "yunchang"),
    *("torch_context_parallel", "fla_context_parallel"),
)
UNTRIED = "was not tried with one rank"


def _one_rank_reason(config: TrialConfig) -> str | None:
    """Why one real rank cannot stand for all; None if it can.

    Raises:
        ConfigError: its link's curves are no curves.
    """
    if config.world == "ranks":
        return None
    if problem := links.curve_problem(config.link):
        raise ConfigError(problem)
    method, engine = config.method.name, config.engine.name
    if config.world_size == 1:
        return "world=one_rank of 1 rank sends nothing; use world=ranks, or a larger sp_size"
    if config.workload.name not in ("attention", "train_step"):
        return f"world=one_rank: workload={config.workload.name} compares ranks; use attention or train_step"
    if engine not in ONE_RANK_ENGINES:
        return f"world=one_rank: engine={engine} {UNTRIED}; use one of {', '.join(ONE_RANK_ENGINES)}"
    if methods.get(method).IMPLEMENTATION != "sp_bench" and method not in ONE_RANK_LIBRARIES:
        return f"world=one_rank: method={method} {UNTRIED}; use our methods or {', '.join(ONE_RANK_LIBRARIES)}"
    if closed_forms.traffic_is_mean(method) and config.model.num_kv_heads % config.sp_size:
        return (
            f"world=one_rank: num_kv_heads={config.model.num_kv_heads} over sp_size={config.sp_size} gives ranks of "
            f"{method} different heads; use method=ulysses"
        )
    for option, value in (("method.exchange", config.method.exchange), ("workload.launch", config.workload.launch)):
        if value in ("copy_engines", "cuda_graph"):
            return f"world=one_rank: {option}={value} goes past the process group, which models the links; leave it out"
    if config.hardware.ranks_per_gpu > 1:
        return f"world=one_rank has its GPU alone, not hardware.ranks_per_gpu={config.hardware.ranks_per_gpu}; use 1"
    passing = {"variant": config.method.variant, "states": config.method.states}
    if chained := [option for option, value in passing.items() if value == "chain"]:
        said = f"world=one_rank with method.{chained[0]}=chain"
        return f"{said}: each rank waits for all before it; use method.{chained[0]}=gather"
    return None


def _missing_devices(config: TrialConfig, num_gpus: int | None) -> str | None:
    needed = config.gpus_per_node
    if config.hardware.device == "cpu":
        needed = config.processes_per_host
        return None if needed <= MAX_CPU_RANKS else f"{needed} ranks; on one CPU at most {MAX_CPU_RANKS}"
    if num_gpus is None:
        return f"hardware={config.hardware.name} needs {needed} CUDA devices; no NVIDIA driver here"
    if num_gpus < needed and config.num_hosts > 1:
        return (
            f"{config.world_size} ranks on num_nodes={config.num_nodes} need {needed} CUDA devices of each; {num_gpus} "
            "here"
        )
    if num_gpus < needed:
        return (
            f"{config.world_size} ranks (sp_size={config.sp_size} x dp_replicate_size={config.dp_replicate_size} x "
            f"dp_shard_size={config.dp_shard_size}) need {needed} CUDA devices; {num_gpus} here"
        )
    return None


def _too_long_reason(config: TrialConfig, device_name: str | None, measure_s: float, warmup_s: float) -> str | None:
    """Why a single step or its warm-up could not end before its deadline; None if they could, or if the peak of the
    devices is not known."""
    if not config.workload.single_step or (one_step_s := step_s(config, device_name, BEST_SHARE)) is None:
        return None
    steps = config.workload.warmup_steps
    phases = {"measure": (one_step_s, measure_s), "warmup": (steps * one_step_s, warmup_s if steps else math.inf)}
    for phase, (needed_s, deadline_s) in phases.items():
        if needed_s + SPARE_S > deadline_s:
            what = "the step" if phase == "measure" else f"{steps} step{'s' if steps > 1 else ''} before it"
            return (
                f"workload.single_step=true: {what} would take about {needed_s:.0f} s ({BEST_SHARE:.0%} of the peak "
                f"of {config.world_size} x {peak_device(config, device_name)}), and with {SPARE_S:.0f} s to spare that "
                f"is more than deadlines.{phase}={deadline_s:.0f}; use {math.ceil(needed_s + SPARE_S)} or more, or a "
                "smaller seq_len"
            )
    return None


def _missing_memory(config: TrialConfig, host_bytes: int | None) -> str | None:
    """Why the trial cannot fit the host, by exact count. Any other trial runs, and may end as `oom`, which is a
    result."""
    needed = memory.needed_on_host_bytes(config)
    if host_bytes is None or needed <= host_bytes:
        return None
    have = f"{needed / 2**30:,.1f} GiB of host memory; this machine has {host_bytes / 2**30:,.1f} GiB"
    if config.workload.name == "attention":
        fits = config.num_nodes * host_bytes // memory.held_bytes_per_token(config)
        return f"inputs, outputs and gradients of all ranks take {have}; use less than seq_len={fits}"
    on_gpus, offloads = config.hardware.device == "cuda", config.workload.checkpoint_offload
    updated = config.engine.optimizer_offload is not None or not on_gpus
    parts = ["parameters, gradients, optimizer states"] if updated else []
    parts += ["offloaded checkpoints"] * offloads + ["processes"] * on_gpus
    smaller = "seq_len or model" if offloads else "model"
    return f"{', '.join(parts)} together take {have}; use a smaller {smaller}"


def process_key(config: TrialConfig) -> tuple[str, ...]:
    """Trials in a row of one replicate with an equal key share one warm process group; empty: fresh processes.

    It holds whatever processes are started with (`ranks.environment`).
    """
    if config.isolation == "trial":
        return ()
    hardware, kinds = config.hardware, (config.fabric.name, config.hardware.name, config.engine.name)
    started_with = (
        *(str(hardware.threads_per_rank), str(hardware.allocator), f"{hardware.ranks_per_gpu:06d}"),
        repr(sorted(config.fabric.env.items())),
    )
    world = (config.world, str(real_rank.real_place(config)), repr(config.link)) if config.world == "one_rank" else ()
    return (f"{config.world_size:06d}", *kinds, *started_with, f"{config.num_nodes:06d}", *world)


def plan(
    configs: Iterable[TrialConfig],
    replicates: int,
    order_seed: int,
    num_gpus: int | None,
    host_bytes: int | None = None,
    device_name: str | None = None,
    measure_s: float = math.inf,
    warmup_s: float = math.inf,
    num_hosts: int | None = 1,
) -> list[Trial]:
    """Trials in the order to run them: randomised complete blocks, one block a replicate, reproducible by seed.

    Equal configs are one cell, even if different blocks of a sweep file have them. `device_name` is that of this
    machine's CUDA devices, `measure_s` and `warmup_s` deadlines in seconds, `num_hosts` as in
    `unsupported_reason`.

    Raises:
        ConfigError: more than MAX_TRIALS trials, or options of a method that no shape could make valid.
    """
    cells: dict[str, tuple[TrialConfig, str | None]] = {}
    for config in configs:
        cell = cell_id(config)
        if cell not in cells:
            reason = unsupported_reason(config, num_gpus, host_bytes, num_hosts)
            cells[cell] = (config, reason or _too_long_reason(config, device_name, measure_s, warmup_s))
    if len(cells) * replicates > MAX_TRIALS:
        raise ConfigError(
            f"replicates={replicates} of {len(cells)} cells are {len(cells) * replicates:,} trials, more than "
            f"{MAX_TRIALS:,}; use fewer replicates, or several campaigns"
        )
    order = random.Random(order_seed)
    trials: list[Trial] = []
    for replicate in range(replicates):
        block = list(cells)
        order.shuffle(block)
        block.sort(key=lambda cell: process_key(cells[cell][0]))  # stable: random within each process group
        for cell in block:
            config, reason = cells[cell]
            trials.append(Trial(config, cell, names.trial_id(cell, replicate), replicate, len(trials), reason))
    return trials
