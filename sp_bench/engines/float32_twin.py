"""The trial in float32 that proves the training step of one in half precision. It imports no torch."""

from dataclasses import replace

from sp_bench import methods
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.kernels import REFERENCE


def float32_twin(config: TrialConfig) -> tuple[TrialConfig, str]:
    """The trial whose training step is proven in float32 for `config`, which is in half precision, on the math kernel;
    and what that proves: method, or step_only where the method takes half precision only. There our method with the
    same degrees stands in.

    On packs transformers' flash attention stays, because it finds the documents otherwise than sdpa does, whose math
    backend it would be. The math kernel then replaces flash-attn's two functions alone.
    """
    workload = replace(config.workload, linear_dtype="model")  # FP8 is proven beside it (oracle/float8.py)
    twin = replace(config, dtype="float32", kernel=KernelConfig(REFERENCE), workload=workload)
    of_transformers = config.engine.facts.decoder == "transformers"
    if of_transformers and config.kernel.name == "flash_attn" and workload.packing != "none":
        twin = replace(twin, kernel=config.kernel)
    method = methods.get(config.method.name)
    shapes = [twin.attention_shape(config.seq_len, kind) for kind in twin.kinds if kind != "delta"]
    if not any(method.unsupported_reason(config.method, REFERENCE, shape, config.sp_size) for shape in shapes):
        return twin, "method"
    cut = method.layout(config.method, config.sp_size)
    ours = MethodConfig("usp", cut.kind, None, cut.ulysses_degree, None, "float32")
    if not cut.ulysses_inner:
        ours = replace(ours, placement="ring_inner")
    if cut.ring_degree == 1:
        ours = MethodConfig("ulysses")
    elif cut.ulysses_degree == 1:
        ours = MethodConfig("ring", cut.kind, dkv_dtype="float32")
    return replace(twin, method=ours), "step_only"
