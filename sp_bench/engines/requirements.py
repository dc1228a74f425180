"""Which trials the engines can run, and whose code they are: known without torch and without the libraries."""

import shutil
from dataclasses import replace
from functools import cache

from sp_bench import engines, hardware, methods
from sp_bench.config.documents import MULTIPLE
from sp_bench.config.engine import FACTS, EngineConfig
from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.attention import Traffic
from sp_bench.costs.training import FLOAT8_MULTIPLE, block_shapes, gathers_float8, train_step_traffic
from sp_bench.engines.float32_twin import float32_twin
from sp_bench.engines.libraries import ATTENTION, CONTEXT_PARALLEL
from sp_bench.kernels import REFERENCE
from sp_bench.methods import installed

HF_METHOD = "deepspeed_ulysses_hf"
MEGATRON_METHOD = "transformer_engine"
MEGATRON_VARIANTS = ("p2p", "all_gather", "a2a")  # cp_comm_type; a2a+p2p would need hierarchical process groups
# engines whose loaders know documents and masked labels
_PACKING = ("fsdp2", *(name for name, facts in FACTS.items() if facts.decoder == "transformers"))
# Ada, the first whose tensor cores have FP8, and Hopper, for which TransformerEngine has block-wise products
FLOAT8_CAPABILITY = {"float8_rowwise": (8, 9), "float8_tensorwise": (8, 9), "float8_blockwise": (9, 0)}


def implementation(engine: EngineConfig) -> str:
    """Whose code trains: sp_bench, or the libraries and their versions."""
    if engine.name not in engines.NAMES:
        return engines.get_outside(engine.name).IMPLEMENTATION
    return " ".join(map(installed, engine.facts.packages)) or "sp_bench"


def batch_loading(engine: EngineConfig) -> str:
    """Where the tokens of a timed step come onto the device: before (the first step) | in_step."""
    if engine.name not in engines.NAMES:
        return engines.get_outside(engine.name).BATCH_LOADING
    return "in_step" if engine.facts.decoder == "transformers" else "before"


def traffic(config: TrialConfig, padded_len: int, attention: Traffic) -> Traffic | None:
    """Bytes one rank sends off-rank in one step; `attention` is that of one attention call. None: the engine decides
    some of them while it runs, as ZeRO-3 does."""
    if config.engine.name not in engines.NAMES:
        engine = engines.get_outside(config.engine.name)
        return None if engine.UNPREDICTED else engine.traffic(config, padded_len)
    return train_step_traffic(config, attention) if config.engine.name == "fsdp2" else None


def unsupported_reason(config: TrialConfig) -> Prose | None:
    """Why this trial's engine cannot run it, or cannot prove its step, naming what works, or None."""
    stages = config.of_stages if config.workload.stages else ()  # with options of their own
    reason = next(filter(None, map(_reason, (config, *stages))), None)
    if reason or config.workload.name != "train_step" or config.dtype in ("float64", "float32"):
        return reason
    reason = _reason(float32_twin(config)[0])
    return f"a step in {config.dtype} is proven in float32 too, and there: {reason}" if reason else None


def _reason(config: TrialConfig) -> Prose | None:
    name = config.engine.name
    if name not in engines.NAMES:
        return engines.get_outside(name).unsupported_reason(config)
    return _step_reason(config) or (_fsdp2_reason(config) if name == "fsdp2" else _library_reason(config))


def _step_reason(config: TrialConfig) -> Prose | None:
    """What one step cannot be, by what all or most engines have."""
    name, engine = config.engine.name, config.engine
    if config.method.layout == "document_zigzag" and MULTIPLE % (2 * config.sp_size):
        valid = ", ".join(str(n) for n in range(1, MULTIPLE) if MULTIPLE % (2 * n) == 0)
        return (
            f"sp_size={config.sp_size}: method.layout=document_zigzag cuts each document into {2 * config.sp_size} "
            f"equal parts, documents are multiples of {MULTIPLE} tokens, and training pads none of them; use sp_size "
            f"in {{{valid}}}, or method.layout=zigzag"
        )
    if (tile := config.workload.mlp_tile_tokens) is not None and not (name == "fsdp2" or engine.facts.hf_on_zero_3):
        return (
            f"workload.mlp_tile_tokens={tile}: engine {name} computes an MLP without tiles; leave it out, or use "
            "engine=fsdp2 or hf_deepspeed"
        )
    if config.workload.checkpoint_offload and name != "fsdp2":
        why = "keeps its checkpoints on the device"
        if name == "trl_sft":  # 1.16: its loss takes the plain tensors that come back for DeepSpeed's parameters
            why = "has activation_offloading, which fails under ZeRO-3 ('Tensor' object has no attribute 'ds_status')"
        return f"workload.checkpoint_offload=true: engine {name} {why}; use false, or engine=fsdp2"
    if (tile := config.workload.loss_tile_tokens) is not None and name not in ("fsdp2", "hf_deepspeed"):
        return (
            f"workload.loss_tile_tokens={tile}: engine {name} has no choice of its loss's tiles; leave it out, or use "
            "engine=fsdp2 or hf_deepspeed"
        )
    in_groups = name == "megatron" and config.workload.policy is not None  # a document is a whole sequence of its group
    if (packing := config.workload.packing) != "none" and name not in _PACKING and not in_groups:
        return (
            f"workload.packing={packing}: engine {name} trains whole sequences here; use "
            f"engine={' or '.join(_PACKING)}, or workload.packing=none"
        )
    if packing != "none" and name != "fsdp2" and config.kernel.name == "cpu_flash":
        return (
            f"workload.packing={packing}: engine {name} is proven with kernel=math and flash_attn, not cpu_flash; use "
            "one of these"
        )
    if (share := config.workload.masked_label_share) and name not in _PACKING:
        return (
            f"workload.masked_label_share={share}: engine {name} trains on all labels here; use "
            f"engine={' or '.join(_PACKING)}, or workload.masked_label_share=0"
        )
    if (config.model.sinks or {*config.model.kinds} != {"full"}) and name != "fsdp2":
        return (
            f"model.layers={config.model.layers}, model.sinks={config.model.sinks}: engine {name} trains layers of one "
            "kind without sinks here; use engine=fsdp2, or a model without them"
        )
    if config.workload.fit and (reason := _fit_reason(config)):
        return reason
    if config.workload.single_step and config.workload.warmup_steps == 0 and name != "fsdp2":
        # it has no moments yet, or ZeRO-3 gathers nothing ahead in it
        return (
            f"workload.single_step=true: the first step of engine {name} peaks below later ones; use "
            "workload.warmup_steps=1"
        )
    return None


def _fsdp2_reason(config: TrialConfig) -> Prose | None:
    engine = config.engine
    if engine.variable_seq_len is not None:
        return "engine fsdp2 has no variable_seq_len; leave it out"
    if (offload := engine.optimizer_offload) not in (None, "torch_adamw"):
        return f"engine.optimizer_offload={offload}: engine fsdp2 steps with torch's AdamW; use torch_adamw"
    if engine.reduce_gradients == "last_micro_batch" and config.workload.micro_batches in (None, 1):
        return (
            "engine.reduce_gradients=last_micro_batch: with one micro-batch a step it changes nothing; use "
            "workload.micro_batches of 2 or more, or each_micro_batch"
        )
    if engine.reshard_after_forward is False and engine.backward_prefetch is not None:
        return (
            f"engine.backward_prefetch={engine.backward_prefetch}: with reshard_after_forward=false the backward "
            "gathers nothing; leave one of them out"
        )
    reasons = (_selective_output_reason, _checkpoint_offload_reason, _model_code_reason, _float8_reason)
    return next(filter(None, (reason(config) for reason in reasons)), None)


def _library_reason(config: TrialConfig) -> Prose | None:
    """What engines of libraries cannot do."""
    name, engine, facts = config.engine.name, config.engine, config.engine.facts
    if facts.sharding != "zero_3" and (engine.optimizer_offload is not None or engine.variable_seq_len is not None):
        return f"engine {name} has neither optimizer_offload nor variable_seq_len; leave them out"
    linear = config.workload.linear_dtype
    if linear != "model" and name != "megatron":
        # torchao's product saves its weight. FSDP2 empties that memory, but DeepSpeed lets go of it and gathers anew.
        why: Prose = "would keep all gathered matrices until the backward, as torchao's products save their weights"
        if name == "hf_fsdp2":
            why = "runs layers without torch.compile, and torchao's rounding costs more than FP8 saves without it"
        return f"workload.linear_dtype={linear}: engine {name} {why}; use model, or engine=fsdp2"
    if linear == "float8_rowwise":
        return (
            f"workload.linear_dtype={linear}: TransformerEngine has no such recipe; use float8_tensorwise or "
            "float8_blockwise"
        )
    own = replace(engine, optimizer_offload=None, variable_seq_len=None)
    if own != EngineConfig(name):
        return (
            f"engine {name} has neither forward_prefetch, backward_prefetch, reshard_after_forward nor "
            "reduce_gradients; leave them out, or use engine=fsdp2"
        )
    if (code := config.workload.model_code) not in (None, "eager") and not (code == "liger" and facts.hf_on_zero_3):
        return f"workload.model_code={code}: engine {name} runs its model's own code; leave it out, or use engine=fsdp2"
    if reason := _checkpointing_reason(config):
        return reason
    if missing := hardware.missing_packages(*facts.packages):
        return f"engine {name} needs {' and '.join(missing)}: pip install 'sp-bench[{facts.extra}]'"
    if name == "hf_fsdp2":
        return _hf_fsdp2_reason(config)
    if name == "megatron":
        return _megatron_reason(config) or _float8_reason(config)
    return _deepspeed_reason(config) or (None if name == "deepspeed" else _hf_on_zero_3_reason(config))


def _checkpointing_reason(config: TrialConfig) -> Prose | None:
    """What engines but fsdp2 cannot recompute."""
    name, checkpointing = config.engine.name, config.workload.activation_checkpointing
    said = f"workload.activation_checkpointing={checkpointing}: engine {name}"
    if checkpointing in (None, "none", "full") or (name == "megatron" and checkpointing == "selective"):
        return None
    if name != "megatron":
        return f"{said} has whole layers recomputed or none here; use none or full, or engine=fsdp2"
    if checkpointing == "selective_mlp":
        return (
            f"{said} recomputes MLPs whole or keeps all of them, and has no checkpoint around the rest; use none, "
            "selective or full, or engine=fsdp2"
        )
    return (
        f"{said} keeps an attention's q, k and v beside its output, or calls its kernel again; use none, selective or "
        "full, or engine=fsdp2"
    )


def _fit_reason(config: TrialConfig) -> Prose | None:
    name, method = config.engine.name, config.method.name
    if config.engine.facts.hf_on_zero_3 or (name == "fsdp2" and hasattr(methods.get(method), "kernel_calls")):
        return None
    return (
        f"workload.fit=true: engine {name} with method {method} cannot leave attention's arithmetic out; use "
        "engine=fsdp2 and a method of sp_bench, hf_deepspeed, hf_trainer or trl_sft, or workload.fit=false"
    )


def _selective_output_reason(config: TrialConfig) -> Prose | None:
    name = config.method.name
    if config.workload.activation_checkpointing != "selective_output" or methods.get(name).IMPLEMENTATION == "sp_bench":
        return None
    return (
        f"workload.activation_checkpointing=selective_output: method {name} cannot be called again without its kernel, "
        "as our methods can; use selective, or a method of sp_bench"
    )


def _checkpoint_offload_reason(config: TrialConfig) -> Prose | None:
    name, checkpointing = config.method.name, config.workload.activation_checkpointing
    if not config.workload.checkpoint_offload or checkpointing == "full":
        return None
    if methods.get(name).IMPLEMENTATION == "sp_bench":
        return None
    return (
        f"workload.checkpoint_offload=true: with activation_checkpointing={checkpointing} method {name} keeps tensors "
        "that it may have made on streams of its own; use full, or a method of sp_bench"
    )


def _model_code_reason(config: TrialConfig) -> Prose | None:
    code, device = config.workload.model_code, config.hardware.device
    if code == "compiled" and device == "cpu" and not shutil.which("g++"):
        return "workload.model_code=compiled: on a CPU torch.compile needs a C++ compiler; install g++, or use eager"
    if code == "liger" and device == "cpu":
        return "workload.model_code=liger: Liger's kernels run on CUDA only; use eager or compiled"
    if code == "liger" and hardware.missing_packages("liger-kernel"):
        return "workload.model_code=liger needs liger-kernel: pip install 'sp-bench[liger]'"
    return None


def _float8_reason(config: TrialConfig) -> Prose | None:
    """What keeps the layers' matrices from being multiplied in FP8. The reference quantises the tokens of one sequence
    as a rank does, so a rank has those of one."""
    name, workload, model = config.engine.name, config.workload, config.model
    said = f"workload.linear_dtype={workload.linear_dtype}"
    if workload.linear_dtype == "model":
        return None
    for option, value, works in (
        ("dtype", config.dtype, "bfloat16"),
        ("batch_size", config.batch_size, 1),
        ("workload.packing", workload.packing, "none"),
        ("workload.mlp_tile_tokens", workload.mlp_tile_tokens, None),
        ("engine.optimizer_offload", config.engine.optimizer_offload, None),
    ):
        if value != works:
            word = "null" if works is None else works
            return f"{said}: {option}={value} is not proven in FP8; use {option}={word}, or workload.linear_dtype=model"
    if name == "fsdp2" and workload.linear_dtype == "float8_blockwise":
        return f"{said}: torchao's block-wise products are a prototype; use engine=megatron, or float8_rowwise"
    unit = FLOAT8_MULTIPLE[workload.linear_dtype]
    sizes = {"seq_len": (config.seq_len, unit * config.sp_size), "model.hidden_size": (model.hidden_size, unit)}
    sizes |= {"model.intermediate_size": (model.intermediate_size, unit)}
    sizes |= {"model.num_kv_heads x head_dim": (model.num_kv_heads * model.head_dim, unit)}
    for of, (size, multiple) in sizes.items():
        if size % multiple:
            return f"{said}: {of}={size} is not a multiple of {multiple}, as products in FP8 need; use one that is"
    rows = {shape[0] for shape in block_shapes(model).values() if len(shape) == 2}
    if (
        name == "fsdp2"
        and gathers_float8(config)
        and (uneven := [each for each in sorted(rows) if each % config.num_shards])
    ):
        return (
            f"{said}: a matrix of {uneven[0]} rows cannot be gathered in FP8 by {config.num_shards} ranks, which must "
            "have equally many; use float8_rowwise, which is gathered in bf16, or another number of ranks"
        )
    if name == "fsdp2" and hardware.missing_packages("torchao"):
        return f"{said} needs torchao: pip install 'sp-bench[float8]'"
    return _float8_device_reason(workload.linear_dtype) if config.hardware.device == "cuda" else None


@cache
def _float8_device_reason(linear_dtype: str) -> Prose | None:
    """Cached, as the driver answers slowly. Without a driver nothing is known: a plan may be made where it does not
    run."""
    found, least = hardware.gpus(), FLOAT8_CAPABILITY[linear_dtype]
    for gpu in found.devices if found else ():
        if gpu.capability is None or gpu.capability < least:
            capability = ".".join(map(str, gpu.capability or ("unknown",)))
            return (
                f"workload.linear_dtype={linear_dtype} runs on GPUs of compute capability {least[0]}.{least[1]} and "
                f"above, not on {gpu.name} ({capability}); use model"
            )
    return None


def _deepspeed_reason(config: TrialConfig) -> Prose | None:
    name = config.engine.name
    if config.dtype not in ("float32", "bfloat16"):
        return f"engine {name} trains in float32 or bfloat16, not dtype={config.dtype}; use one, or engine=fsdp2"
    if config.dp_replicate_size > 1 and not config.engine.facts.is_trainer:
        return (
            f"dp_replicate_size={config.dp_replicate_size}: ZeRO-3 of engine {name} shards over all ranks; use "
            f"dp_shard_size={config.dp_replicate_size * config.dp_shard_size}, or engine=fsdp2"
        )
    if name == "deepspeed" and config.engine.variable_seq_len is not None:
        return "engine deepspeed has no variable_seq_len; leave it out, or use engine=hf_deepspeed"
    return None


def _hf_on_zero_3_reason(config: TrialConfig) -> Prose | None:
    name, method, facts = config.engine.name, config.method.name, config.engine.facts
    if config.sp_size == 1 and method != "single":
        return f"sp_size=1: engine {name} then has no sequence parallelism; use method=single, or sp_size of 2 or more"
    if config.sp_size > 1 and method != HF_METHOD:
        return f"engine {name} has one sequence parallelism, not method={method}; use method={HF_METHOD}"
    if 1 < config.sp_size < config.world_size and config.fabric.backend == "gloo":
        return (
            f"fabric={config.fabric.name}: over gloo the gradient of the losses' all_gather takes a rank of the group "
            f"for one of the world, so sp_size={config.sp_size} must be all {config.world_size} ranks; use it, or "
            "fabric=nvlink"
        )
    if facts.is_trainer and config.hardware.device == "cpu" and (reason := _trainer_on_cpu_reason(config)):
        return reason
    if config.kernel.name not in ATTENTION:
        return f"engine {name} runs no kernel={config.kernel.name}; use one of {', '.join(ATTENTION)}"
    return _model_code_reason(config) or _model_reason(config)


def _model_reason(config: TrialConfig) -> Prose | None:
    model = config.model
    if model.qkv_bias and model.qk_norm:
        return (
            f"engine {config.engine.name} builds Qwen3 (model.qk_norm), Qwen2 (model.qkv_bias) or Llama models, and "
            f"{model.name} has both; use engine=fsdp2"
        )
    return None


def _trainer_on_cpu_reason(config: TrialConfig) -> Prose | None:
    if config.dtype != "float32":
        return f"dtype={config.dtype}: on a CPU the Trainer refuses it; use dtype=float32, or engine=hf_deepspeed"
    if config.engine.name == "hf_trainer" and config.sp_size > 1 and config.batch_size > 1:
        return (
            f"batch_size={config.batch_size}: on a CPU the labels that the Trainer's loader cuts are no view that its "
            "loss could flatten; use batch_size=1, or engine=hf_deepspeed"
        )
    return None


def _hf_fsdp2_reason(config: TrialConfig) -> Prose | None:
    method, kernel = config.method, config.kernel.name
    if config.workload.packing != "none" and config.sp_size > 1:
        return (
            f"workload.packing={config.workload.packing}, sp_size={config.sp_size}: torch's context parallelism shards "
            "scaled_dot_product_attention without its mask, and takes no lengths of documents; use sp_size=1, or "
            "engine=hf_deepspeed with kernel=flash_attn"
        )
    if config.hardware.device == "cpu":
        return (
            "hardware.device=cpu: there Accelerate has no FSDP2 and takes each rank for the only process; use "
            "engine=fsdp2, or GPUs"
        )
    if config.dtype not in ("float32", "bfloat16"):
        return f"engine hf_fsdp2 trains in float32 or bfloat16, not dtype={config.dtype}; use one, or engine=fsdp2"
    if config.num_shards == 1:
        return (
            "dp_shard_size=1, sp_size=1: Accelerate's FSDP2 needs ranks to shard over; use dp_shard_size or sp_size of "
            "2 or more"
        )
    if config.dp_replicate_size > 1 and config.dp_shard_size == 1:
        return (
            f"dp_replicate_size={config.dp_replicate_size}, dp_shard_size=1: Accelerate refuses replicas without "
            "dp_shard; use dp_shard_size of 2 or more, or dp_replicate_size=1"
        )
    if config.sp_size == 1 and method.name != "single":
        return "sp_size=1: engine hf_fsdp2 then has no context parallelism; use method=single, or sp_size of 2 or more"
    in_proof = config.dtype == "float32" and (method.name, kernel) == ("ring", REFERENCE)
    if config.sp_size > 1 and method.name != CONTEXT_PARALLEL and not in_proof:
        return (
            f"engine hf_fsdp2 has one context parallelism, not method={method.name}; use method={CONTEXT_PARALLEL} "
            "(our ring stands in for it where a step is proven in float32)"
        )
    if config.sp_size > 1 and method.layout != "zigzag":
        return (
            f"method.layout={method.layout}: Accelerate leaves torch's load balancing on, which is zigzag; use "
            "method.layout=zigzag"
        )
    if kernel not in ("sdpa_flash", "cudnn", REFERENCE):
        return f"engine hf_fsdp2 runs sdpa, not kernel={kernel}; use sdpa_flash or cudnn"
    return _model_reason(config)


def _megatron_reason(config: TrialConfig) -> Prose | None:
    method, kernel = config.method, config.kernel.name
    if (scaling := config.model.rope_scaling) is not None:
        return f"model.rope_scaling={scaling}: engine megatron rotates without scaling here; use engine=fsdp2"
    if config.hardware.device == "cpu":
        return (
            "hardware.device=cpu: Megatron-Core's data parallelism and its optimizer take tensors on CUDA only; use "
            "engine=fsdp2, or GPUs"
        )
    if config.dp_replicate_size > 1:
        return (
            f"dp_replicate_size={config.dp_replicate_size}: engine megatron shards its optimizer over all ranks; "
            f"use dp_shard_size={config.dp_replicate_size * config.dp_shard_size}, or engine=fsdp2"
        )
    if config.dtype == "float32":
        if kernel == REFERENCE and methods.get(method.name).IMPLEMENTATION == "sp_bench":
            return None
        return (
            f"dtype=float32, method={method.name}, kernel={kernel}: in float32 engine megatron runs our methods on "
            "kernel=math, as its proof does; use them, or dtype=bfloat16"
        )
    if config.dtype != "bfloat16":
        return f"engine megatron trains in bfloat16, not dtype={config.dtype}; use it, or engine=fsdp2"
    if config.sp_size == 1 and method.name != "single":
        return "sp_size=1: engine megatron then has no context parallelism; use method=single, or sp_size of 2 or more"
    if config.sp_size > 1 and (method.name != MEGATRON_METHOD or method.variant not in MEGATRON_VARIANTS):
        return (
            f"engine megatron has the context parallelism of TransformerEngine, not method={method.name} with "
            f"variant={method.variant}; use method={MEGATRON_METHOD} with method.variant in "
            f"{', '.join(MEGATRON_VARIANTS)}"
        )
    if kernel not in ("flash_attn", "cudnn"):
        return f"engine megatron runs TransformerEngine's kernels, not kernel={kernel}; use flash_attn or cudnn"
    if kernel == "flash_attn" and "flash-attn-4" in hardware.package_versions():
        return (
            "kernel=flash_attn: with flash-attn-4 installed TransformerEngine under engine megatron runs that, and not "
            "FlashAttention-2; uninstall flash-attn-4, or use kernel=cudnn"
        )
    return None
