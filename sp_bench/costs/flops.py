"""FLOPs of one step of any workload."""

from dataclasses import replace

from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import TRAINING
from sp_bench.costs import training
from sp_bench.costs.attention import attention_forward_flops, backward_per_forward
from sp_bench.costs.attention import computed as of_kernels
from sp_bench.costs.work import projection_flops


def step_flops(config: TrialConfig, padded_len: int) -> dict[str, float]:
    """model_flops and hardware_flops of one step of all ranks: by the model's definition, and of what is computed."""
    if config.workload.name in TRAINING:
        model, hardware_ = training.model_flops(config), training.hardware_flops(config, padded_len)
    else:
        computed = config.attention_shape(config.seq_len)  # with what is padded
        asked_for = replace(computed, seq_len=config.seq_len, documents=config.documents(config.seq_len))
        of_kernel = of_kernels(config.method, computed)
        model, hardware_ = attention_forward_flops(asked_for), attention_forward_flops(of_kernel)
        backward = config.workload.pass_kind == "forward_backward"
        if backward:
            model, hardware_ = 3 * model, hardware_ * (1 + backward_per_forward(of_kernel))
        model += projection_flops(MethodConfig("single"), asked_for, 1, [0], backward=backward)
        hardware_ += projections(config)
    return {"model_flops": float(model), "hardware_flops": float(hardware_)}


def projections(config: TrialConfig) -> int:
    """FLOPs of the up-projections of latents of all ranks, in attention alone."""
    ranks, backward = range(config.sp_size), config.workload.pass_kind == "forward_backward"
    shape = config.attention_shape(config.seq_len)
    return projection_flops(config.method, shape, config.sp_size, ranks, backward=backward)
