"""What methods, kernels, fabrics and settings are called on a page, in a figure and in a paper. Names are made here and
nowhere else; identifiers are for the appendix and the CSV."""

from collections.abc import Mapping, Sequence
from typing import Any

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.formats import counted, whole
from sp_bench.analysis.series import OF_STEP, SINGLE_STEP, one_rank_words, option_words
from sp_bench.config.trial import TRAINING
from sp_bench.costs.flags import OF_DEVICES
from sp_bench.rows.names import short_name

METHODS = {
    "single": "one rank",
    "ulysses": "Ulysses",
    "upipe": "UPipe",
    "ring": "ring",
    "double_ring": "double ring",
    "all_gather": "all-gather",
    "usp": "USP",
    "deepspeed_ulysses": "DeepSpeed's Ulysses",
    "deepspeed_ulysses_hf": "DeepSpeed's UlyssesSPAttentionHF",
    "ring_flash_attn": "ring-flash-attn",
    "ring_flash_attn_llama3": "ring-flash-attn, llama3",
    "yunchang": "yunchang",
    "torch_context_parallel": "torch context parallel",
    "transformer_engine": "TransformerEngine",
}
WITH_ARTICLE = ("ring", "double_ring", "all_gather")
KERNELS = {
    "flash_attn_4": "FlashAttention-4",
    "flash_attn_3": "FlashAttention-3",
    "flash_attn": "FlashAttention-2",
    "cudnn": "cuDNN",
    "sdpa_flash": "aten's flash",
    "cpu_flash": "aten's CPU flash",
    "math": "plain math",
}
FABRICS = {
    "nvlink": "NVLink",
    "channels_2": "2 NCCL channels",
    "channels_1": "1 NCCL channel",
    "shm": "host memory",
    "socket": "TCP sockets",
    "network": "NVLink and the network",
    "gloo": "gloo",
}
WORKLOADS = {
    ("attention", "forward_backward"): "Attention, forward and backward",
    ("attention", "forward"): "Attention, forward",
    ("train_step", "step"): "Training step",
    ("parity", "step"): "Training parity",
    ("collective", "exchange"): "Messages alone",
}
MODELS = {
    "qwen3_0_6b": "Qwen3-0.6B",
    "qwen3_1_7b": "Qwen3-1.7B",
    "qwen3_4b": "Qwen3-4B",
    "qwen3_8b": "Qwen3-8B",
    "llama3_8b": "Llama-3-8B",
    "qwen2_5_7b": "Qwen2.5-7B",
    "tiny": "a tiny model",
}
VARIANTS = {"allgather": "all-gather", "alltoall": "all-to-all", "a2a": "all-to-all", "p2p": "ring", "usp": "USP",
            "ulysses": "Ulysses", "all_gather": "all-gather", "a2a+p2p": "USP"}  # fmt: skip
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
PACKING = "workload.packing"
DRAWN = (PACKING, "workload.document_len", "workload.document_sigma")  # the options that `drawn` says
LENGTHS = (*DRAWN[1:], "workload.document_lens")  # what a distribution has beside its name
FLAGS = {
    "short_window": "timed for less than 0.2 s",
    "clock_mismatch": "clocks that disagree by over 2%",
    "window_disagrees": "step times that the window does not bear out within 2%",
    "unsettled": "steps that grew or shrank by over 3%",
    "transient": "single steps over 5% off their neighbours, or a trend",
    "bimodal": "steps in a fast and a slow group",
    "host_bound": "steps that wait for the host",
    **OF_DEVICES,
    "loss_not_falling": "a loss that does not fall",
    "kernel_uncounted": "calls of the attention kernel that nobody counted",
    "full_depth_unproven": "steps of all layers that are not shown to be right",
    "foreign_load": "other load on the machine",
    "unequal_nodes": "hosts that are not equal",
    "allocator_retried": "an allocator at the brink",
    "above_device_memory": "more memory in use than the emulated device has",
    "leftover_memory": "a peak that has leftovers of other work in it",
    "single_step": "one step alone, counted while it was timed",
    "fit": "attention's arithmetic left out",
    "shared_gpu": "ranks that share a GPU",
}


def kernel(cell: Cell) -> str:
    name = cell.asked["kernel"]
    return KERNELS.get(name, str(name)) if name is not None else ""


def fabric(name: Any) -> str:
    return FABRICS.get(name, str(name))


def method(cell: Cell, but: Sequence[str] = ()) -> str:
    """`Ulysses, 4 chunks, copy engines`; `zigzag ring`; `zigzag double ring, 4x2`, whose inner rings have 4 ranks. Two
    cells of one place and kernel have different ones, but for the options `but`."""
    asked, options, told = cell.asked, cell.options, cell.name.told
    name = METHODS.get(asked["method"], str(asked["method"]))
    if asked["method"] == "single" and asked["workload"] == "attention":
        return f"{kernel(cell)} alone"
    layout = asked["layout"]
    of_ring = asked["method"] in WITH_ARTICLE or (layout not in (None, "contiguous"))
    parts = [name]
    if cell.is_library:
        parts += [VARIANTS.get(asked["variant"], str(asked["variant"]))] if asked["variant"] else []
        parts += [layout] if of_ring and layout else []
    elif of_ring and layout:
        parts = [f"{layout} {name}"]
    if (chunks := options.get("method.head_chunks")) not in (None, 1):
        parts.append(f"{chunks} chunks")
    if isinstance(stages := options.get("method.head_stages"), int):
        parts.append(f"{stages} stages")
    if isinstance(inner := options.get("method.inner_ring_degree"), int):
        outer = asked["sp_size"] // inner
        parts.append(f"{inner}x{outer}{'' if min(inner, outer) > 1 else ' is one ring'}")
    if (stride := options.get("method.head_stride")) not in (None, "all"):
        parts.append(f"{stride} KV head{'s' if stride != 1 else ''} at a time")
    if options.get("method.exchange") == "copy_engines":
        parts.append("copy engines")
    if asked["placement"] == "ring_inner":
        parts.append("ring inside")
    by_pack = () if cell.name.pack is None else ("seed",)
    parts += [_told(path, value) for path, value in told.items() if path not in (*_SAID, *by_pack, *but)]
    return ", ".join(filter(None, parts))


def plain_method(cell: Cell) -> str:
    """Without layout and options."""
    name = METHODS.get(cell.asked["method"], str(cell.asked["method"]))
    variant = cell.asked["variant"] if cell.is_library else None
    return f"{name}, {VARIANTS.get(variant, str(variant))}" if variant else name


_SAID = (
    *("method.name", "kernel.name", "method.exchange", "method.head_chunks", "method.head_stride"),
    *("method.head_stages", "method.inner_ring_degree"),
)
ONE_STEP = "one step"  # was timed
_USUAL = {"method.dkv_dtype": "input", "method.merge_dtype": "float32"}
_DTYPE_OF = {"method.dkv_dtype": "dK/dV", "method.merge_dtype": "merges"}


def _told(path: str, value: Any) -> str:
    if path in _DTYPE_OF:
        if value == _USUAL[path]:
            return ""
        return (
            f"{_DTYPE_OF[path]} in {DTYPES.get(value, 'the input' if value == 'input' else str(value))}"
            if value
            else ""
        )
    if value is None:
        return ""
    if path == SINGLE_STEP:
        return ONE_STEP if value else ""
    return str(value) if path == "implementation" else f"{short_name(path)}={value}"


def the_method(cell: Cell) -> str:
    """In a sentence: `the zigzag ring`, `Ulysses (4 chunks)`."""
    name, comma, options = method(cell).partition(", ")
    name = f"the {name}" if cell.asked["method"] in WITH_ARTICLE else name
    return f"{name} ({options})" if comma else name


def listed_words(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1] if words else ""]))


def processors(cell: Cell) -> str:
    """4 GPUs, 2 CPU ranks; of the ranks that share a sequence and, where there are more, of all."""
    asked = cell.asked
    size, world = asked["sp_size"], asked["world_size"] or asked["sp_size"]
    noun = "GPU" if cell.processor == "GPU" else "CPU rank"
    told = f"{whole(size)} {noun}{'' if size == 1 else 's'}"
    return told if world == size else f"{told} of {whole(world)}"


def place(cell: Cell) -> str:
    """131,072 tokens on 4 GPUs; of several packs beside each other which one."""
    return ", ".join(filter(None, [size(cell), pack(cell)]))


def size(cell: Cell) -> str:
    """131,072 tokens on 4 GPUs."""
    length = cell.asked["seq_len"]
    return f"{whole(length)} tokens on {processors(cell)}" if length else f"on {processors(cell)}"


def pack(cell: Cell) -> str:
    """pack of seed 3; nothing where no other pack of the same distribution stands beside it."""
    return "" if cell.name.pack is None else f"pack of seed {cell.name.pack}"


def workload(cell: Cell) -> str:
    asked = cell.asked
    return WORKLOADS.get((asked["workload"], asked["pass_kind"]), f"{asked['workload']} {asked['pass_kind']}")


def is_packed(cell: Cell) -> bool:
    return cell.asked["packing"] not in (None, "none")


def packed(cell: Cell) -> str:
    """packed documents: lognormal, median 4,096, sigma 1; or nothing."""
    return f"packed documents: {drawn(cell)}" if is_packed(cell) else ""


def distribution(cell: Cell) -> str:
    """lognormal, median 4,096, sigma 1: 24 documents, the longest has 21,968 tokens; of several packs its seed too."""
    which = ", ".join(filter(None, [drawn(cell), pack(cell)]))
    known = next((row for row in cell.rows if row["num_documents"] is not None), None)
    if known is None or not is_packed(cell):
        return which
    number_of, longest = counted(known["num_documents"], "document"), whole(known["longest_document"])
    return f"{which}: {number_of}, the longest has {longest} tokens"


def drawn(cell: Cell) -> str:
    """lognormal, median 4,096, sigma 1."""
    if not is_packed(cell):
        return "one document"
    length, sigma, _ = (cell.options.get(path) for path in LENGTHS)
    told = {"fixed": f"all of {whole(length)} tokens", "file": "a given list"}.get(str(cell.asked["packing"]))
    return told or f"{cell.asked['packing']}, median {whole(length)}, sigma {sigma or 0:g}"


ISOLATION = {"group": "warm processes", "trial": "fresh processes"}


def option(path: str, value: Any) -> str:
    """What tells two settings apart."""
    if (path, value) == (PACKING, "none"):
        return "not packed"
    return ISOLATION.get(value, str(value)) if path == "isolation" else option_words(path, value)


def of_step(path: str, value: Any) -> str:
    """An option of a training step beside others of it: all recomputed, compiled, loss_tile_tokens=2048."""
    if value is None:
        return ""
    if path == "workload.activation_checkpointing":
        return {"full": "all recomputed", "none": "nothing recomputed"}.get(value, str(value))
    if path == "workload.checkpoint_offload":
        return "checkpoints offloaded" if value else ""
    return str(value) if path in ("workload.model_code", "engine.name") else option(path, value)


# Options of a training step that have a column of their own in a table whose lines differ in them -> its head
STEP_COLUMNS = {
    "workload.activation_checkpointing": "recomputed",
    "workload.model_code": "code",
    "workload.loss_tile_tokens": "loss tile",
    "workload.mlp_tile_tokens": "MLP tile",
    "workload.checkpoint_offload": "checkpoints",
    "engine.optimizer_offload": "optimizer",
    "hardware.allocator": "allocator",
}


def step_columns(cells: Sequence[Cell]) -> list[str]:
    """The options of STEP_COLUMNS in which training steps differ."""
    steps = [cell for cell in cells if cell.asked["workload"] in TRAINING]
    return [path for path in STEP_COLUMNS if len({str(cell.options.get(path)) for cell in steps}) > 1]


def in_column(path: str, value: Any) -> str:
    """Under a head of STEP_COLUMNS; empty where the option is not set."""
    if path == "workload.checkpoint_offload":
        return "on the host" if value else ""
    if path == "workload.activation_checkpointing":
        return {"full": "all", "none": "nothing"}.get(value, str(value or ""))
    return "" if value is None else whole(value) if isinstance(value, int) else str(value)


def setting(cell: Cell, values: Mapping[str, Any]) -> tuple[str, ...]:
    """What all cells of a setting share, without its fabric, in a reader's words, a piece each. `values`: Name.values
    of any of them."""
    asked = cell.asked
    words = [workload(cell)]
    if asked["workload"] in ("train_step", "parity"):
        model = MODELS.get(asked["model"], str(asked["model"]))
        words[0] += f" of {model}"
        words.append(f"{asked['num_layers']} layers" if asked["model"] not in MODELS else "")
    if asked["num_heads"] is not None:
        words.append(f"{asked['num_heads']}/{asked['num_kv_heads']} heads of {asked['head_dim']}")
    words += ["" if asked["causal"] in (True, None) else "not causal", DTYPES.get(asked["dtype"], str(asked["dtype"]))]
    words.append(f"batch {asked['batch_size']}" if asked["batch_size"] not in (None, 1) else "")
    known = {path: value for path, value in values.items() if value is not None}
    engine = known.get("engine.name")
    words.append(f"{engine}" if engine else "")
    if cell.micro_batches > 1:
        words.append(f"{cell.micro_batches} micro-batches")
    words.append(of_step("workload.activation_checkpointing", known.get("workload.activation_checkpointing")))
    words += [of_step(path, known[path]) for path, usual in OF_STEP.items() if known.get(path, usual) != usual]
    if known.get("world") == "one_rank":
        words.append(one_rank_words(known["link.name"]))
    if (cap := known.get("hardware.device_memory_gib")) is not None:
        words.append(f"capped at {cap:g} GiB")
    if (sharing := known.get("hardware.ranks_per_gpu", 1)) > 1:
        words.append(f"{sharing} ranks share a GPU")
    if known.get("engine.optimizer_offload"):
        words.append("optimizer offloaded")
    data = (asked["dp_replicate_size"], asked["dp_shard_size"])
    words.append(f"data parallel {data[0]} x {data[1]}" if data not in ((1, 1), (None, None)) else "")
    words.append(packed(cell))
    if share := cell.options.get("workload.masked_label_share"):
        words.append("half of the labels masked" if share == 0.5 else f"{share:.0%} of the labels masked")
    words.append("CUDA graph" if cell.launch_note else "")
    words.append(str(asked["hardware"]).upper() if asked["hardware"] else "")
    return tuple(filter(None, words))
