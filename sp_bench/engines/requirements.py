"""What the engines are made of and which trials they can run: known without torch and without the libraries."""

from sp_bench import engines, hardware
from sp_bench.config.trial import EngineConfig, TrialConfig
from sp_bench.methods import installed

HF_METHOD = "deepspeed_ulysses_hf"
ATTENTION = {  # our kernels -> what transformers calls the attention that launches them
    "flash_attn": "flash_attention_2",
    "sdpa_flash": "sdpa",
    "cudnn": "sdpa",
    "cpu_flash": "sdpa",
}
_PACKAGES = {
    "fsdp2": (),
    "deepspeed": ("deepspeed",),
    "hf_deepspeed": ("deepspeed", "transformers"),
    "hf_trainer": ("deepspeed", "transformers", "accelerate"),
    "trl_sft": ("deepspeed", "transformers", "accelerate", "trl"),
}
_EXTRAS = {"deepspeed": "deepspeed", "hf_deepspeed": "hugging-face", "hf_trainer": "hugging-face", "trl_sft": "trl"}
_TRAINERS = ("hf_trainer", "trl_sft")


def implementation(engine: EngineConfig) -> str:
    """Whose code trains: sp_bench, or the libraries and their versions."""
    if engine.name not in engines.NAMES:
        return engines.get_outside(engine.name).IMPLEMENTATION
    return " ".join(map(installed, _PACKAGES[engine.name])) or "sp_bench"


def unsupported_reason(config: TrialConfig) -> str | None:
    """Why this trial's engine cannot run it, naming what works, or None."""
    name, engine = config.engine.name, config.engine
    if name not in engines.NAMES:
        return engines.get_outside(name).unsupported_reason(config)
    if (tile := config.workload.loss_tile_tokens) is not None and name != "fsdp2":
        return (
            f"workload.loss_tile_tokens={tile}: engine {name} computes its loss without tiles; leave it out, or use "
            "engine=fsdp2"
        )
    if name == "fsdp2":
        return None if engine == EngineConfig() else "engine fsdp2 has no options; leave engine.* out"
    if missing := [p for p in _PACKAGES[name] if p not in hardware.package_versions()]:
        return f"engine {name} needs {' and '.join(missing)}: pip install 'sp-bench[{_EXTRAS[name]}]'"
    return _deepspeed_reason(config) or (None if name == "deepspeed" else _hugging_face_reason(config))


def _deepspeed_reason(config: TrialConfig) -> str | None:
    name = config.engine.name
    if config.dtype not in ("float32", "bfloat16"):
        return f"engine {name} trains in float32 or bfloat16, not dtype={config.dtype}; use one, or engine=fsdp2"
    if config.dp_replicate_size > 1 and name not in _TRAINERS:
        return (
            f"dp_replicate_size={config.dp_replicate_size}: ZeRO-3 of engine {name} shards over all ranks; use "
            f"dp_shard_size={config.dp_replicate_size * config.dp_shard_size}, or engine=fsdp2"
        )
    if name == "deepspeed" and config.engine.variable_seq_len is not None:
        return "engine deepspeed has no variable_seq_len; leave it out, or use engine=hf_deepspeed"
    return None


def _hugging_face_reason(config: TrialConfig) -> str | None:
    name, method, model = config.engine.name, config.method.name, config.model
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
    if name in _TRAINERS and config.hardware.device == "cpu" and (reason := _trainer_on_cpu_reason(config)):
        return reason
    if config.kernel.name not in ATTENTION:
        return f"engine {name} runs no kernel={config.kernel.name}; use one of {', '.join(ATTENTION)}"
    if model.qkv_bias and model.qk_norm:
        return (
            f"engine {name} builds Qwen3 (model.qk_norm), Qwen2 (model.qkv_bias) or Llama models, and {model.name} has "
            "both; use engine=fsdp2"
        )
    return None


def _trainer_on_cpu_reason(config: TrialConfig) -> str | None:
    if config.dtype != "float32":
        return f"dtype={config.dtype}: on a CPU the Trainer refuses it; use dtype=float32, or engine=hf_deepspeed"
    if config.engine.name == "hf_trainer" and config.sp_size > 1 and config.batch_size > 1:
        return (
            f"batch_size={config.batch_size}: on a CPU the labels that the Trainer's loader cuts are no view that its "
            "loss could flatten; use batch_size=1, or engine=hf_deepspeed"
        )
    return None
