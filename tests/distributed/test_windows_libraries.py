"""Which libraries compute windows and sinks under sequence parallelism: docs/WINDOWS.md's table, where a CPU can tell.

Tiny models of transformers with windows, 2 gloo ranks, fp32, against one process with the models' own masks. A library
that computes what a model without a window would is said to ignore it. The flash kernels are a stand-in: these tests
show which tokens they would get, and say nothing about the kernels.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import flash_attn_stand_in
import pytest
import torch
import torch.distributed as dist
from ranks import run
from test_engines import HF, WITH_TRL, as_a_rank
from test_packed_hugging_face import flash_attn_here
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from trials import TINY, job, trial

from sp_bench.attention.autograd import differentiable
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.attention.masked import Masked
from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.model import ModelConfig
from sp_bench.config.windows import Window
from sp_bench.engines import hugging_face
from sp_bench.engines.hugging_face import model_config
from sp_bench.hardware import package_versions
from sp_bench.kernels import math
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods._ring_flash_attn import load
from sp_bench.oracle import training_step

S, WINDOW = 32, 5
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
IGNORED, SAME = 0.02, 1e-4  # relative errors of logits: of another mask, and of rounding


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [each for each in packages if each not in package_versions()]
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed")


def model_of(kind: str, window: int, implementation: str) -> Any:
    """A tiny model of transformers whose layers have windows: of gpt-oss and Gemma the first, of Mistral both."""
    import transformers

    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if kind == "GptOss" else {}
    made = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    layers = {} if kind == "Mistral" else {"layer_types": ["sliding_attention", "full_attention"]}
    config = made(**SMALL, **experts, **layers, sliding_window=window)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=implementation)


def tokens() -> Tensor:
    return torch.randint(0, 64, (1, S), generator=torch.Generator().manual_seed(1))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def check_deepspeed_ignores(rank: int, kind: str) -> None:
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
        UlyssesSPAttentionHF,
    )

    with mock.patch.object(deepspeed.ops, "__compatible_ops__", {}):  # else it builds a C++ extension for its messages
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    positions = torch.arange(S)[None]
    with torch.no_grad():
        windowed, full = (
            model_of(kind, window, "eager").train()(tokens(), position_ids=positions).logits for window in (WINDOW, S)
        )
    assert relative(full, windowed) > IGNORED  # else nothing is shown
    model = model_of(kind, WINDOW, "sdpa").train()
    UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1, seq_length=S
    )
    mine = slice(rank * S // 2, (rank + 1) * S // 2)
    with torch.no_grad():
        got = model(tokens()[:, mine], position_ids=positions[:, mine]).logits
    assert relative(got, full[:, mine]) < SAME
    assert rank == 0 or relative(got, windowed[:, mine]) > IGNORED


@needs("transformers", "accelerate", "deepspeed")
@pytest.mark.parametrize("kind", ["Gemma3", "Mistral"])
def test_deepspeeds_ulysses_ignores_the_window_on_sdpa_and_says_nothing(kind: str) -> None:
    run(2, check_deepspeed_ignores, kind)


def with_windows(model: ModelConfig, seq_len: int) -> Any:
    """transformers' config of the model, whose layers all have windows."""
    config = model_config(model, seq_len)
    config.layer_types, config.sliding_window = ["sliding_attention"] * model.num_layers, 12
    return config


@contextmanager
def math_with_windows() -> Iterator[None]:
    """transformers' flash attention calls our math kernel with the window that flash-attn would get."""
    from transformers import modeling_flash_attention_utils as utils  # pyright: ignore[reportMissingImports]

    def whole(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int] = (-1, -1)
    ) -> Tensor:
        mask = {} if window_size == (-1, -1) else {"window": Window(window_size[0], 0)}
        return differentiable(Masked(math, mask), causal=causal, scale=softmax_scale)(q, k, v)

    def functions(*_: Any, **__: Any) -> tuple[Any, Any]:
        arguments = utils._lazy_define_process_function(whole)
        paged = hasattr(utils, "_process_with_kvcache_kwargs_fn")
        return (whole, None, None, None, None), (arguments, None) if paged else arguments

    with mock.patch.object(utils, "lazy_import_flash_attention", functions):
        yield


def check_trainers(rank: int, engine: str) -> None:
    """The gate of training steps tells: Qwen3 with a window of 12 of 48 tokens in each layer, against our reference
    with that window. On sdpa it is, under Ulysses, our model without windows."""
    as_a_rank(rank, 2)
    windows = replace(TINY, layers="window", window=12)

    def prove(method: str, sp_size: int, model: ModelConfig = windows, kernel: str = "math") -> None:
        shards = {"dp_shard_size": 2 // sp_size, "engine": EngineConfig(engine), "kernel": KernelConfig(kernel)}
        config = trial(MethodConfig(method), sp_size, model=model, **shards)
        mine = job(config)
        training_step.prove(config, mine.mesh, mine.device)

    with mock.patch.object(hugging_face, "model_config", with_windows):
        prove("single", 1)
        with pytest.raises(Incorrect, match="of step 1 differs from one process"):
            prove(HF, 2)
        prove(HF, 2, TINY)
        with flash_attn_here(), mock.patch.object(hugging_face, "_math_as_flash_attn", math_with_windows):
            prove(HF, 2, kernel="flash_attn")
            with pytest.raises(Incorrect, match="of step 1 differs from one process"):
                prove(HF, 2, TINY, kernel="flash_attn")


@needs("transformers", "accelerate", "deepspeed")
@pytest.mark.parametrize("engine", ["hf_deepspeed", "hf_trainer", WITH_TRL])
def test_trainers_under_ulysses_ignore_windows_on_sdpa_and_pass_them_to_flash_attention(engine: str) -> None:
    run(2, check_trainers, engine)


@needs("transformers", "accelerate", "deepspeed")
def test_gpt_oss_has_no_sdpa_and_deepspeeds_ulysses_no_eager() -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
        UlyssesSPAttentionHF,
    )

    with pytest.raises(ValueError, match=r"does not support an attention implementation through.*scaled_dot_product"):
        model_of("GptOss", WINDOW, "sdpa")
    model = model_of("GptOss", WINDOW, "eager")
    with (
        mock.patch("deepspeed.runtime.sequence_parallel.parallel_state_sp.initialize_sequence_parallel"),
        pytest.raises(ValueError, match="eager attn_implementation isn't currently supported"),
    ):
        UlyssesSPAttentionHF.register_with_transformers(
            model, core_attn_implementation="eager", sequence_parallel_size=2, micro_batch_size=1, seq_length=S
        )


@needs("transformers", "accelerate")
@pytest.mark.parametrize("kind", ["Gemma3", "Mistral", "GptOss"])
def test_accelerates_context_parallelism_refuses_models_with_windows(kind: str) -> None:
    from accelerate.big_modeling import _attach_context_parallel_hooks  # pyright: ignore[reportMissingImports]

    with pytest.raises(ValueError, match="does not support attention layers of type"):
        _attach_context_parallel_hooks(model_of(kind, WINDOW, "eager"))


def flash_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """flash-attn's function with its windows, where -1 is no limit and a causal mask ends at the token itself."""
    left, right = options["window_size_left"], 0 if options["causal"] else options["window_size_right"]
    far = q.shape[1] + k.shape[1]
    window = Window(far if left < 0 else left, far if right < 0 else right)
    out, lse = math.forward(q, k, v, causal=False, scale=options["softmax_scale"], window=window)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


@contextmanager
def flash_with_windows(module: str) -> Iterator[Any]:
    flash_attn_stand_in.install()
    load()
    library = importlib.import_module(module)

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
                window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Any,
                return_softmax: bool) -> Any:  # fmt: skip
        return flash_forward(q, k, v, softmax_scale=softmax_scale, causal=causal, window_size_left=window_size_left,
                             window_size_right=window_size_right)  # fmt: skip

    with mock.patch.object(library, "_flash_attn_forward", forward):
        yield library


def check_ring_flash_attn_is_wrong(rank: int) -> None:
    """Each block gets the window as if it were the queries' own, so that keys of the rank before are seen at the wrong
    distance. With a window as long as the sequence the same call is right."""
    q, k, v = torch.randn(3, 1, S, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = slice(rank * S // 2, (rank + 1) * S // 2)
    with flash_with_windows("ring_flash_attn.ring_flash_attn") as library:
        for window, wrong in ((WINDOW, True), (None, False)):
            sides = (-1, -1) if window is None else (window - 1, 0)
            got = library.ring_flash_attn_func(*(x[:, mine] for x in (q, k, v)), causal=True, window_size=sides)
            want, _ = math.forward(q, k, v, causal=False, scale=8**-0.5, window=Window((window or S) - 1, 0))
            error = relative(got, want[:, mine])
            assert error > 0.1 if wrong and rank else error < SAME, (rank, window, error)
    dist.barrier()


@needs("ring-flash-attn")
def test_ring_flash_attn_does_not_shift_the_window_from_block_to_block() -> None:
    run(2, check_ring_flash_attn_is_wrong)


def check_torch_context_parallel(rank: int) -> None:
    """Its functions for the fused kernels refuse a mask, in which a window would go in. On FlexAttention it gathers all
    keys, and masks them right, on zigzag shards and on contiguous ones. Only the forward runs on CPUs."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as library
    from torch.nn.attention.flex_attention import flex_attention

    mesh, length, window = init_device_mesh("cpu", (2,)), 512, 100  # its blocks are of 128 tokens
    q, k, v = torch.randn(3, 1, 4, length, 16, generator=torch.Generator().manual_seed(0))
    ahead = torch.arange(length)[:, None] - torch.arange(length)
    seen = (ahead >= 0) & (ahead < window)
    for fused in (
        library._scaled_dot_product_ring_efficient_attention,
        library._scaled_dot_product_ring_cudnn_attention,
    ):
        with pytest.raises(NotImplementedError, match="attn_bias is not supported yet"):
            fused(mesh, q, k, v, attn_bias=seen.to(q.dtype))

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Any:
            return flex_attention(q, k, v, block_mask=block_mask)

    attention = Attention()
    library._ContextParallel(2, library._ContextParallel.AttentionType.FLEX)._apply(attention, mesh)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    for balanced, kind in ((False, "contiguous"), (True, "zigzag")):
        mine = SequenceLayout(kind, 2).global_positions(rank, length)
        with mock.patch.object(library._cp_options, "enable_load_balance", balanced), torch.no_grad():
            mask = library._create_cp_block_mask(
                lambda b, h, i, j: (i >= j) & (i - j < window), 1, 1, length, length, mesh
            )
            got = attention(*(x[:, :, mine] for x in (q, k, v)), mask)
        assert relative(got, want[:, :, mine]) < SAME, kind


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_torchs_context_parallelism_refuses_masks_but_on_flex_attention() -> None:
    run(2, check_torch_context_parallel)
