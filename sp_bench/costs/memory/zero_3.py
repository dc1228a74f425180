"""Engines hf_deepspeed, hf_trainer and trl_sft: transformers' model on DeepSpeed's ZeRO-3."""

from math import prod

from sp_bench.config.shape import ELEMENT_BYTES
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory import transformers
from sp_bench.costs.memory.parts import BF16, FP32, Peak, around_logits, head_elements, local_tokens, page_locked
from sp_bench.costs.training import block_shapes, num_parameters

# DeepSpeed's defaults, which our settings leave as they are: stage3_max_live_parameters and sub_group_size.
MAX_LIVE_PARAMETERS = SUB_GROUP_PARAMETERS = 10**9


def peak(config: TrialConfig, copies: int, _: bool) -> Peak:
    """All ranks share each parameter.

    Parameters and gradients are bf16, each in one buffer. Their fp32 copies and the moments are the optimizer's. The
    prefetcher runs ahead until so many parameters are whole as its limit allows.
    """
    model, tokens = config.model, local_tokens(config)
    number, head = num_parameters(model), head_elements(config)
    mine, matrix = number / config.world_size, max(map(prod, block_shapes(model).values()))
    offloads = config.engine.optimizer_offload is not None
    held = mine * (BF16 if offloads else 2 * BF16 + 3 * FP32)
    whole = BF16 * min(number, MAX_LIVE_PARAMETERS + matrix) if config.world_size > 1 else 0
    kept = model.num_layers * transformers.kept_bytes(config)
    # A tied head's gradient waits for the embedding's.
    waits = BF16 * head if model.tie_embeddings else 0
    layer = held + whole + kept + waits + tokens * BF16 * transformers.computed_elements(config)
    # With sequence parallelism DeepSpeed reduces gradients in fp32.
    reduced = head * (2 * BF16 + (FP32 if config.sp_size > 1 else 0))
    updated = 0 if offloads else FP32 * min(mine, SUB_GROUP_PARAMETERS)  # the gradients of one group at a time
    return Peak(
        held + whole + kept + transformers.logits_bytes(config) + around_logits(config),
        layer,
        layer,
        held + reduced,
        held + (copies - 3) * updated,
    )


def host_bytes(config: TrialConfig) -> float:
    """Bytes of one rank with an offloaded optimizer: fp32 parameters and moments; fp32 gradients, page-locked for each
    group of parameters that is updated at once; sums of gradients in the trial's dtype, page-locked in one buffer; and
    one group's new parameters in that dtype, on their way to the device. Source: deepspeed/runtime/zero/stage3.py."""
    mine, element = num_parameters(config.model) / config.world_size, ELEMENT_BYTES[config.dtype]
    groups, rest = divmod(mine, SUB_GROUP_PARAMETERS)
    gradients = groups * page_locked(FP32 * SUB_GROUP_PARAMETERS) + page_locked(FP32 * rest)
    cast = element * min(mine, SUB_GROUP_PARAMETERS) if element != FP32 else 0
    return 3 * FP32 * mine + gradients + page_locked(element * mine) + cast
