"""Valid rows for tests of whatever reads rows: built in memory, committed through `sp_bench.rows.store.write`.

Times are made up; FLOPs and bytes come from `sp_bench.costs`, so that rows agree with themselves.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from sp_bench.analysis import device_sets
from sp_bench.analysis.cells import Cell, cells
from sp_bench.analysis.selection import COLUMNS, Selection, select
from sp_bench.config.options import OPTIONS
from sp_bench.config.shape import AttentionShape
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import TRAINING
from sp_bench.costs import attention as attention_costs
from sp_bench.planning import plan
from sp_bench.rows import row as row_of
from sp_bench.rows import store
from sp_bench.rows.names import config_leaves

from .records import PROOFS

ENV_ID, STARTED_AT = "e0e0e0e0", datetime(2030, 5, 4, 12, 0, tzinfo=UTC)  # after every change of code that moves speed
BUDGET = dict.fromkeys(("output", "dq", "dk", "dv"), 6e-7)
ASKED = (  # what makes two rows the same cell
    *("method", "implementation", "primitive", "layout", "variant", "placement", "dkv_dtype", "head_stride"),
    "head_chunks",
    *("kernel", "workload", "pass_kind", "model", "isolation"),
    *("fabric", "hardware", "device_memory_gib", "batch_size", "seq_len", "sp_size", "ulysses_degree", "ring_degree"),
    *("dp_replicate_size", "dp_shard_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "causal", "dtype"),
    "config",
)
SHAPE = ("batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim", "causal", "dtype")
PRIMITIVES = {
    "single": "none",
    "ulysses": "all_to_all",
    "ring": "send_recv",
    "all_gather": "all_gather",
    "usp": "all_to_all+send_recv",
}
NOT_OF_EXCHANGE = (  # null in rows of the collective workload
    *("layout", "kernel", "model", "batch_size", "seq_len", "padded_seq_len"),
    *("num_heads", "num_kv_heads", "head_dim", "causal"),
)
STEPS = (-2, -1, 0, 1, 2)  # percent of the median that each timed step is off
OF_BACKWARD = dict.fromkeys(("rel_error_dq", "rel_error_dk", "rel_error_dv"), 2e-7) | {
    "sampled_grad_error": dict.fromkeys(("dq", "dk", "dv"), 1.5e-7),
    "identity_error": PROOFS["attention"]["identity_error"],
}
_RATE = "attention_flops_per_s"
_NAME = ("trial_id", "env_id", "attempt", "status")
ENVIRONMENT = {
    "hostname": "laptop",
    "python": "3.12.3",
    "packages": [("torch", "2.13.0"), ("sp-bench", "0.1.0")],
    "cpu": "a CPU",
    "cpu_cores": 2,
    "process_group": "gloo",
    "env": [("OMP_NUM_THREADS", "1")],
}


def _hash(value: Any, digits: int) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:digits]


def traffic(row: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Bytes by (phase, op) that the row's method predicts for one attention call, with the backward if it has one."""
    shape = AttentionShape(*(row[name] for name in SHAPE))
    size, ulysses, ring = row["sp_size"], row["ulysses_degree"], row["ring_degree"]
    parts = {
        "ulysses": lambda: [attention_costs.ulysses_traffic(shape, size, size)],
        "ring": lambda: [attention_costs.ring_traffic(shape, size, 1, None)],
        "all_gather": lambda: [attention_costs.all_gather_traffic(shape, size, None)],
        "usp": lambda: [
            attention_costs.ulysses_traffic(shape, ulysses, size),
            attention_costs.ring_traffic(shape, ring, ulysses, None),
        ],
    }
    total = attention_costs.add_traffic(*parts.get(row["method"], list)())
    return {k: float(v) for k, v in total.items() if k[0] == "forward" or row["pass_kind"] != "forward"}


def row(*, median_ms: float = 10.0, status: str = "ok", replicate: int = 0, **columns: Any) -> dict[str, Any]:
    """One row of the attention workload on CPU, ok unless `status` says otherwise; `columns` replaces any column."""
    asked: dict[str, Any] = {
        "method": "ring",
        "implementation": "sp_bench",
        "primitive": PRIMITIVES.get(columns.get("method", "ring")),
        "layout": "contiguous",
        "kernel": "cpu_flash",
        "workload": "attention",
        "pass_kind": "forward_backward",
        "model": "tiny",
        "fabric": "gloo",
        "hardware": "cpu",
        "batch_size": 1,
        "seq_len": 1024,
        "sp_size": 2,
        "ulysses_degree": 1,
        "ring_degree": columns.get("sp_size", 2),
        "dp_replicate_size": 1,
        "dp_shard_size": 1,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 32,
        "causal": True,
        "dtype": "float32",
    } | {k: v for k, v in columns.items() if k in ASKED}
    asked.setdefault("config", json.dumps({"hardware": {"name": asked["hardware"], "device": "cpu"}, "seed": 0}))
    given = config_leaves(asked["config"])
    for option in OPTIONS:
        if option.column in asked and option.column not in columns and given.get(option.path) is not None:
            asked[option.column] = given[option.path]
    num_steps = len(columns.get("step_ms") or STEPS)
    asked["config"] = _whole_config(asked["config"], {"timed_steps": num_steps, "warmup_steps": 1} | asked | columns)
    cell_id = hashlib.sha256((asked["config"] or "").encode()).hexdigest()[:12]
    made = {
        "status": status,
        "reason": None if status == "ok" else f"made up: {status}",
        "phase": "done" if status == "ok" else "plan",
        "campaign": "made_up",
        "cell_id": cell_id,
        "trial_id": hashlib.sha256(f"{cell_id}/{replicate}".encode()).hexdigest()[:12],
        "env_id": ENV_ID,
        "replicate": replicate,
        "attempt": 0,
        "padded_seq_len": asked["seq_len"],
        "world_size": asked["sp_size"] * asked["dp_replicate_size"] * asked["dp_shard_size"],
        "started_at": STARTED_AT + timedelta(seconds=replicate),
        "duration_s": 3.0,
        "git_sha": "0123456789abcdef0123456789abcdef01234567",
        "git_dirty": False,
        "environment": ENVIRONMENT,
    }
    measured = _measured(asked, made["world_size"], median_ms, columns) if status == "ok" else {}
    return asked | made | measured | columns | {"config": asked["config"]}


def _whole_config(config: str | None, columns: Mapping[str, Any]) -> str | None:
    """The config with all options that the columns give and it does not, as real rows have it; as it is if it is no
    JSON."""
    leaves = config_leaves(config)
    if not leaves and config != "{}":
        return config
    for option in OPTIONS:
        if option.column and option.group not in leaves and columns.get(option.column) is not None:
            leaves.setdefault(option.path, columns[option.column])
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *groups, name = path.split(".")
        inside = tree
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[name] = value
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))


def _measured(
    asked: Mapping[str, Any], world_size: int, median_ms: float, columns: Mapping[str, Any]
) -> dict[str, Any]:
    step_ms = columns.get("step_ms", [median_ms * (1 + 0.01 * k) for k in STEPS])
    sequences = asked["batch_size"] * asked["dp_replicate_size"] * asked["dp_shard_size"]
    tokens = sequences * (columns.get("micro_batches") or 1) * asked["seq_len"]
    host = (300 + asked["seq_len"] // 64 * 5 // asked["sp_size"]) * 2**20
    comm = columns.get("comm")
    if comm is None:
        comm = [
            {"phase": phase, "op": op, "calls": 1, "predicted_bytes": size, "counted_bytes": size}
            for (phase, op), size in traffic(asked).items()
        ]
    inside = [entry for entry in comm if entry["phase"] != "other"]
    proof = PROOFS[asked["workload"]]
    if asked["pass_kind"] == "forward":
        proof = {name: value for name, value in proof.items() if name not in OF_BACKWARD}
    num_losses = len(step_ms) + (asked["workload"] == "parity")
    losses = {"loss": [5.0 - 0.1 * step for step in range(num_losses)], "grad_norm": [1.0] * num_losses}
    work = {"hardware_flops": columns["attention_flops_per_s"] * median_ms / 1e3} if _RATE in columns else {}
    if "mfu" in columns:
        work = {"hfu": columns["mfu"], "hardware_flops": columns.get("model_flops")}
    return (
        proof
        | work
        | (losses if asked["workload"] in TRAINING else {})
        | {
            "warmup_steps": 1,
            "timed_steps": len(step_ms),
            "step_ms": step_ms,
            "rank_step_ms": [step_ms] * world_size,
            "window_ms": [sum(step_ms)] * world_size,
            "median_step_ms": median_ms,
            "tokens_per_s": 1e3 * tokens / median_ms,
            "tokens_per_s_per_gpu": 1e3 * tokens / median_ms / world_size,
            "peak_host_bytes": [host] * world_size,
            "max_peak_host_bytes": host,
            "comm": comm,
            "comm_predicted_bytes": math.fsum(entry["predicted_bytes"] or 0 for entry in inside),
            "comm_counted_bytes": math.fsum(entry["counted_bytes"] or 0 for entry in inside),
            "correctness_seq_len": 256,
            "rel_error_output": 1.2e-7,
            **({} if asked["pass_kind"] == "forward" else OF_BACKWARD),
            "error_budget": BUDGET,
        }
    )


def collective(fabric: str, primitive: str, gib_per_s: float, **columns: Any) -> dict[str, Any]:
    """A row of the collective workload: the bandwidth of one primitive on 8 ranks unless `columns` says otherwise."""
    method = {value: name for name, value in PRIMITIVES.items()}[primitive.partition(" by ")[0]]
    asked = {"sp_size": 8, "method": method, "primitive": primitive, "fabric": fabric} | columns
    asked["ring_degree"] = 1 if method == "ulysses" else asked["sp_size"]
    largest = {"comm_counted_bytes": 2.0**28, "median_ms": 1e3 * 2**28 / (gib_per_s * 2**30)}
    sent = {"phase": "forward", "op": primitive, "calls": 1, "predicted_bytes": 2.0**28, "counted_bytes": 2.0**28}
    made = row(workload="collective", pass_kind="exchange", comm=[sent], **largest | asked)
    curve = [{"message_bytes": 2**28, "ms": made["median_step_ms"]}]
    rates = {
        "curve": curve,
        "latency_us": 20.0,
        "bandwidth_bytes_per_s": 1.2 * gib_per_s * 2**30,
    }  # the line's: steeper
    return made | rates | dict.fromkeys((*NOT_OF_EXCHANGE, "tokens_per_s", "tokens_per_s_per_gpu"))


def commit(rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for each in rows:
        store.write(each, folder)
    return folder


def selection_of(rows: Iterable[Mapping[str, Any]]) -> Selection:
    """A campaign with these rows, of one environment, without files: writing them is what takes time."""
    table = pa.Table.from_pylist([dict(each) for each in rows], schema=store.SCHEMA)
    table = row_of.as_written_today(table).select(list(COLUMNS))
    frame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get).assign(folder="made_up", pool="env")
    files = [store.RowName(*name).file_name for name in zip(*(frame[c] for c in _NAME), strict=True)]
    frame["file"] = [f"made_up/{file}" for file in files]
    frame["core_id"] = frame["core_id"].fillna(frame["env_id"])
    frame["device_set"] = device_sets.numbered(frame["environment"])
    return Selection(frame, len(frame), 0, {}, (), ())


def cells_of(rows: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """The cells of `selection_of`."""
    return cells(selection_of(rows).rows)


def read_cells(rows: Iterable[Mapping[str, Any]], folder: Path) -> list[Cell]:
    """The cells of a campaign that is written and read: from there pools and environments come."""
    return cells(select([commit(rows, folder)]).rows)


def splits(sp_size: int) -> list[dict[str, Any]]:
    """Every own method x layout x placement on `sp_size` ranks."""
    if sp_size == 1:
        return [{"method": "single", "sp_size": 1, "ring_degree": 1}]
    ring = {"sp_size": sp_size, "ring_degree": sp_size}
    layouts = ("contiguous", "zigzag", "striped")
    made = [{"method": "ulysses", "sp_size": sp_size, "ulysses_degree": sp_size, "ring_degree": 1}]
    made += [{"method": "ring", "layout": layout, **ring} for layout in layouts]
    made += [{"method": "all_gather", "layout": layout, **ring} for layout in layouts[:2]]
    if sp_size % 2 == 0 and sp_size > 2:
        degrees = {"sp_size": sp_size, "ulysses_degree": 2, "ring_degree": sp_size // 2}
        made += [
            {"method": "usp", "layout": layout, "placement": placement, **degrees}
            for layout in layouts[:2]
            for placement in ("ulysses_inner", "ring_inner")
        ]
    return made


def smoke(replicates: int = 1) -> list[dict[str, Any]]:
    """A campaign as the smoke sweep leaves it: attention at two lengths, the training step at one, one unsupported."""
    cells = [
        {**split, "seq_len": seq_len, "pass_kind": pass_kind}
        for sp_size in (1, 2, 4)
        for split in splits(sp_size)
        for seq_len in (1024, 2048)
        for pass_kind in ("forward", "forward_backward")
        if pass_kind == "forward_backward" or split.get("layout") != "striped"
    ]
    cells += [
        {
            **split,
            "workload": "train_step",
            "pass_kind": "step",
            "seq_len": 512,
            "num_layers": 2,
            "comm": _train_comm(split),
        }
        for sp_size in (1, 2, 4)
        for split in splits(sp_size)
        if split.get("layout") in (None, "zigzag")
    ]
    made = [row(replicate=r, median_ms=_made_up_ms(cell, r), **cell) for cell in cells for r in range(replicates)]
    reason = "num_heads=8 is not divisible by sp_size=3 for ulysses; use sp_size in {1,2,4,8}, or method=ring"
    made.append(row(status="unsupported", reason=reason, method="ulysses", sp_size=3, ulysses_degree=3, ring_degree=1))
    return made


def hf_step(
    *, seq_len: int, median_ms: float = 1000.0, offload: str | None = None, engine: str = "hf_deepspeed", **columns: Any
) -> dict[str, Any]:
    """A training step of Qwen3-4B as Hugging Face's stack runs it on 4 GPUs, without sequence parallelism if `sp_size`
    is 1; its FLOPs are near the model's."""
    size, micro_batches = columns.get("sp_size", 4), columns.get("micro_batches", 1)
    data_ranks = columns.get("dp_shard_size", 1)
    sequences = data_ranks * micro_batches
    asked = {
        "workload": "train_step",
        "pass_kind": "step",
        "model": "qwen3_4b",
        "num_layers": 36,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "seq_len": seq_len,
        "dtype": "bfloat16",
        "kernel": "flash_attn",
        "fabric": "nvlink",
        "hardware": "h200",
        "method": "deepspeed_ulysses_hf" if size > 1 else "single",
        "sp_size": size,
        "ulysses_degree": size,
        "ring_degree": 1,
        "implementation": "deepspeed==0.19.8" if size > 1 else "sp_bench",
        "engine": engine,
        "optimizer_offload": offload,
        "environment": ENVIRONMENT | {"device_names": ["NVIDIA H200"] * size * data_ranks},
    } | columns
    config = {
        "engine": {"name": engine} | ({"optimizer_offload": offload} if offload else {}),
        "hardware": {"name": "h200", "device": "cuda", "device_memory_gib": asked.get("device_memory_gib")},
        "method": {"name": asked["method"]},
        "workload": {"name": "train_step", "activation_checkpointing": "full"}
        | ({"micro_batches": micro_batches} if micro_batches > 1 else {}),
    }
    flops = 3.0 * sequences * (2 * 4.0e9 * seq_len + 36 * 4 * 32 * 128 * seq_len * (seq_len + 1) // 2)
    mfu = 1e3 * flops / median_ms / (size * data_ranks) / 989.4e12
    known = {"model_flops": flops, "mfu": mfu, "comm": []} if asked.get("status", "ok") == "ok" else {}
    return row(median_ms=median_ms, **{"config": json.dumps(config)} | known | asked)


def _made_up_ms(cell: Mapping[str, Any], replicate: int) -> float:
    work = {"forward": 1.0, "forward_backward": 3.2, "step": 9.0}[cell["pass_kind"]] * (cell["seq_len"] / 1024) ** 1.6
    jitter = int(_hash([cell, replicate], 4), 16) / 0xFFFF
    return 12.0 * work / cell["sp_size"] ** 0.7 * (1 + 0.5 * int(_hash(cell, 4), 16) / 0xFFFF + 0.08 * jitter)


def _train_comm(split: Mapping[str, Any]) -> list[dict[str, Any]]:
    size = split["sp_size"]
    if size == 1:
        return []
    one_way = {"ulysses": 3, "ring": 2, "all_gather": 2, "usp": 2.5}[split["method"]] * 131072.0 * (size - 1)
    entries = [("forward", "send", one_way), ("recompute", "send", one_way), ("backward", "send", 2 * one_way)]
    entries += [("parameters", "all_gather", 9e5), ("gradients", "reduce_scatter", 4.5e5), ("loss", "all_reduce", 16.0)]
    made = [{"phase": p, "op": op, "calls": 4, "predicted_bytes": n, "counted_bytes": n} for p, op, n in entries]
    return [*made, {"phase": "other", "op": "all_reduce", "calls": 1, "predicted_bytes": None, "counted_bytes": 8.0}]


def asked_for(config: TrialConfig) -> dict[str, Any]:
    """The columns of its row that say what was asked for."""
    return row_of.asked_for(config, plan.resolve(config))
