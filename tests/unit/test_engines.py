"""What is said of engines before anything is launched: reasons, identities, columns."""

import gc
import json
import math
import shutil
import subprocess
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import engines, hardware, methods
from sp_bench.config.engine import EngineConfig, EngineFacts
from sp_bench.config.parsing import ConfigError, parse
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory
from sp_bench.costs import training as training_costs
from sp_bench.engines import requirements, zero3
from sp_bench.engines.float32_twin import float32_twin
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import closed_forms
from sp_bench.planning import plan
from sp_bench.planning.overrides import choices
from sp_bench.training import model

from .rows import asked_for

FIRST = {"hf_fsdp2": "transformers", "megatron": "megatron-core"}  # packages
OTHERS = [name for name in engines.NAMES if name != "fsdp2"]
HF_ON_ZERO_3 = ["hf_deepspeed", "hf_trainer", "trl_sft"]
PACKED = {"workload__packing": "fixed", "workload__document_len": 64}
MASKED = {"workload__masked_label_share": 0.5}
FULL = {"workload__activation_checkpointing": "full"}
OFFLOADED = FULL | {"workload__checkpoint_offload": True}
SINGLE = {"workload__single_step": True, "workload__warmup_steps": 1, "workload__timed_steps": 1}
FIT = SINGLE | {"workload__fit": True}
VERSIONS = {"deepspeed": "0.19.8", "transformers": "5.17.0", "accelerate": "1.15.0", "trl": "1.16.0"} | {
    "megatron-core": "0.19.2",
    "transformer-engine": "2.20.2",
}
EXTRAS = dict.fromkeys(("hf_deepspeed", "hf_trainer", "hf_fsdp2"), "hugging-face") | {
    "deepspeed": "deepspeed",
    "trl_sft": "trl",
    "megatron": "megatron",
}


@pytest.fixture
def libraries(monkeypatch):
    """As if they were installed."""
    monkeypatch.setattr(hardware, "package_versions", lambda: VERSIONS)


@pytest.fixture
def make(make_config):
    """A trial that its engine can run, but for what is changed."""

    def make(engine: str, **changes) -> TrialConfig:
        method = {"method": "deepspeed_ulysses_hf", "kernel": "flash_attn"} if engine in HF_ON_ZERO_3 else {}
        if engine == "hf_fsdp2":
            method = {"method": "torch_context_parallel", "kernel": "cudnn"}
        if engine == "megatron":
            method = {"method": "transformer_engine", "kernel": "cudnn", "model": "llama3_8b"}
        on_gpus = {"fabric": "nvlink", "hardware": "h200", "dtype": "bfloat16"}
        return make_config(**{"workload": "train_step", "engine": engine, "sp_size": 4, **on_gpus, **method, **changes})

    return make


def test_every_engine_has_its_file():
    assert set(choices("engine")) == set(engines.NAMES)


def test_what_an_engine_is_follows_from_its_name_and_of_one_from_outside_nothing_is_known():
    assert [name for name in engines.NAMES if EngineConfig(name).facts.hf_on_zero_3] == HF_ON_ZERO_3
    assert EngineConfig("from_outside").facts == EngineFacts()


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", engines.NAMES)
def test_an_engine_runs_what_it_is_for(make, name):
    assert requirements.unsupported_reason(make(name)) is None


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("checkpointing", ["selective", "selective_output", "selective_mlp"])
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "megatron"])
def test_engines_that_recompute_no_part_of_a_layer_say_so(make, name, checkpointing):
    reason = requirements.unsupported_reason(make(name, workload__activation_checkpointing=checkpointing))
    said = f"workload.activation_checkpointing={checkpointing}: engine {name} has whole layers recomputed"
    assert reason == said + " or none here; use none or full, or engine=fsdp2"


@pytest.mark.usefixtures("libraries")
def test_megatron_recomputes_mlps_and_says_what_it_cannot(make):
    said = {
        checkpointing: requirements.unsupported_reason(
            make("megatron", workload__activation_checkpointing=checkpointing)
        )
        for checkpointing in ("selective", "selective_mlp", "selective_output")
    }
    assert said["selective"] is None
    assert "recomputes MLPs whole or keeps all of them" in str(said["selective_mlp"])
    assert "keeps an attention's q, k and v beside its output, or calls its kernel again" in str(
        said["selective_output"]
    )


def test_megatrons_selective_step_computes_the_mlps_twice_and_nothing_else(make):
    none, selective, full = (
        make("megatron", workload__activation_checkpointing=each) for each in ("none", "selective", "full")
    )
    mlps = sum(math.prod(s) for name, s in training_costs.block_shapes(none.model).items() if "feed_forward." in name)
    again = 2 * none.model.num_layers * mlps * none.num_sequences * 4096
    flops = training_costs.hardware_flops
    assert flops(selective, 4096) == flops(none, 4096) + again
    assert flops(selective, 4096) < flops(full, 4096)
    assert training_costs.attention_flops(selective, 4096) == training_costs.attention_flops(none, 4096)


@pytest.mark.parametrize(
    ("cp_comm_type", "num_ranks", "said"),
    [
        ("p2p", 4, None),
        ("a2a", 4, "layer 1 has cp_comm_type=a2a over 4 ranks"),
        ("p2p", 2, "layer 1 has cp_comm_type=p2p over 2 ranks"),
        ("p2p", None, "layer 1 has cp_comm_type=p2p over 1 ranks"),
    ],
)
def test_megatrons_layers_must_send_as_the_method_says(make, monkeypatch, cp_comm_type, num_ranks, said):
    from sp_bench.engines import megatron

    def layer(sends_by, ranks):
        attention = SimpleNamespace(cp_comm_type=sends_by, cp_group=ranks)
        return SimpleNamespace(self_attention=SimpleNamespace(core_attention=attention))

    monkeypatch.setattr(megatron.dist, "get_world_size", lambda group: group)
    layers = [layer("p2p", 4), layer(cp_comm_type, num_ranks)]
    built = SimpleNamespace(decoder=SimpleNamespace(layers=layers))
    expected = pytest.raises(Incorrect, match=f"method.variant=p2p, sp_size=4: .* {said}") if said else nullcontext()
    with expected:
        megatron._require_asked_for(make("megatron"), built)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("variant", [None, "ring", "allgather"])
def test_a_cp_comm_type_that_megatron_does_not_have_is_refused_before_the_launch(make, variant):
    config = make("megatron", method__variant=variant)
    with pytest.raises(ConfigError, match="transformer_engine has p2p, all_gather, a2a"):
        plan.unsupported_reason(config, 4, None)
    assert "use method=transformer_engine with method.variant in p2p, all_gather, a2a" in str(
        requirements.unsupported_reason(config)
    )


def test_the_output_alone_is_kept_for_our_methods(make):
    ours, theirs = (
        make("fsdp2", method=method, workload__activation_checkpointing="selective_output")
        for method in ("ring", "ring_flash_attn")
    )
    assert requirements.unsupported_reason(ours) is None
    reason = requirements.unsupported_reason(theirs)
    assert reason is not None
    assert reason.endswith("use selective, or a method of sp_bench")


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", OTHERS)
def test_only_fsdp2_has_a_choice_of_the_models_code(make, name):
    assert requirements.unsupported_reason(make(name, workload__model_code="eager")) is None
    reason = requirements.unsupported_reason(make(name, workload__model_code="compiled"))
    assert reason == (
        f"workload.model_code=compiled: engine {name} runs its model's own code; leave it out, or use engine=fsdp2"
    )


def test_the_models_code_needs_its_compiler_device_and_library(make, monkeypatch):
    on_cpu = {"fabric": "gloo", "hardware": "cpu", "dtype": "float32"}
    compiled, liger = ({"workload__model_code": code} for code in ("compiled", "liger"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert requirements.unsupported_reason(make("fsdp2", **compiled)) is None
    assert "install g++, or use eager" in str(requirements.unsupported_reason(make("fsdp2", **on_cpu, **compiled)))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert requirements.unsupported_reason(make("fsdp2", **on_cpu, **compiled)) is None
    assert "run on CUDA only" in str(requirements.unsupported_reason(make("fsdp2", **on_cpu, **liger)))
    monkeypatch.setattr(hardware, "package_versions", dict)
    assert "pip install 'sp-bench[liger]'" in str(requirements.unsupported_reason(make("fsdp2", **liger)))
    monkeypatch.setattr(hardware, "package_versions", lambda: {"liger-kernel": "0.8.5"})
    assert requirements.unsupported_reason(make("fsdp2", **liger)) is None


@pytest.mark.parametrize("name", OTHERS)
def test_a_missing_library_is_a_reason_that_names_the_extra(make, monkeypatch, name):
    monkeypatch.setattr(hardware, "package_versions", dict)
    reason = str(requirements.unsupported_reason(make(name)))
    assert f"engine {name} needs {FIRST.get(name, 'deepspeed')}" in reason
    assert reason.endswith(f"pip install 'sp-bench[{EXTRAS[name]}]'")


def test_trl_is_asked_for_where_all_the_rest_is_there(make, monkeypatch):
    monkeypatch.setattr(hardware, "package_versions", lambda: {k: v for k, v in VERSIONS.items() if k != "trl"})
    assert requirements.unsupported_reason(make("hf_trainer")) is None
    assert requirements.unsupported_reason(make("trl_sft")) == "engine trl_sft needs trl: pip install 'sp-bench[trl]'"


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "deepspeed",
            {"workload__activation_checkpointing": "full", "workload__mlp_tile_tokens": 64},
            "computes an MLP without tiles; leave it out, or use engine=fsdp2",
        ),
        (
            "hf_fsdp2",
            {"workload__mlp_tile_tokens": 64} | FULL,
            "without tiles; leave it out, or use engine=fsdp2 or hf_",
        ),
        ("hf_trainer", {"workload__loss_tile_tokens": 64}, "no choice of its loss's tiles; .*=fsdp2 or hf_deepspeed"),
        ("hf_deepspeed", OFFLOADED, "keeps its checkpoints on the device; use false, or engine=fsdp2"),
        ("trl_sft", OFFLOADED, "fails under ZeRO-3 .*ds_status.*; use false, or engine=fsdp2"),
        (
            "hf_deepspeed",
            {"workload__model_code": "liger", "fabric": "gloo", "hardware": "cpu"},
            "Liger's kernels run on CUDA only; use eager",
        ),
        ("hf_deepspeed", {"workload__model_code": "liger"}, "needs liger-kernel: pip install 'sp-bench.liger.'"),
        ("hf_fsdp2", FIT, "engine hf_fsdp2 with method torch_context_parallel cannot leave attention's arithmetic out"),
        ("megatron", FIT, "engine megatron with method transformer_engine cannot leave"),
        ("fsdp2", {"engine__variable_seq_len": True}, "fsdp2 has no variable_seq_len"),
        ("fsdp2", {"engine__optimizer_offload": "deepspeed_cpu_adam"}, "steps with torch's AdamW; use torch_adamw"),
        (
            "deepspeed",
            {"engine__reshard_after_forward": False},
            "nor reduce_gradients; leave them out, or use engine=fsdp2",
        ),
        ("hf_trainer", {"engine__backward_prefetch": 2}, "nor reduce_gradients; leave them out, or use engine=fsdp2"),
        ("deepspeed", {"engine__variable_seq_len": True}, "no variable_seq_len; .* use engine=hf_deepspeed"),
        ("deepspeed", {"dtype": "float64"}, "float32 or bfloat16, not dtype=float64"),
        ("deepspeed", {"dp_replicate_size": 2, "dp_shard_size": 2}, "shards over all ranks; use dp_shard_size=4"),
        ("hf_deepspeed", {"dp_replicate_size": 2}, "use dp_shard_size=2"),
        ("hf_deepspeed", {"method": "ulysses"}, "not method=ulysses; use method=deepspeed_ulysses_hf"),
        ("hf_trainer", {"method": "ring"}, "not method=ring; use method=deepspeed_ulysses_hf"),
        ("hf_trainer", {"sp_size": 1}, "sp_size=1: .* use method=single, or sp_size of 2 or more"),
        ("hf_deepspeed", {"kernel": "flash_attn_4"}, "runs no kernel=flash_attn_4; use one of flash_attn, sdpa_flash"),
        ("hf_deepspeed", {"model": "qwen2_5_7b", "model__qk_norm": True}, "qwen2_5_7b has both; use engine=fsdp2"),
        (
            "hf_deepspeed",
            {"fabric": "gloo", "hardware": "cpu", "sp_size": 2, "dp_shard_size": 2},
            "sp_size=2 must be all 4 ranks",
        ),
        (
            "hf_trainer",
            {"fabric": "gloo", "hardware": "cpu", "dtype": "float32", "batch_size": 2},
            "batch_size=2: on a CPU .* use batch_size=1",
        ),
        ("hf_trainer", {"fabric": "gloo", "hardware": "cpu"}, "dtype=bfloat16: on a CPU .* use dtype=float32"),
        ("trl_sft", {"fabric": "gloo", "hardware": "cpu"}, "dtype=bfloat16: on a CPU .* use dtype=float32"),
        ("trl_sft", {"method": "ulysses"}, "not method=ulysses; use method=deepspeed_ulysses_hf"),
        ("hf_fsdp2", {"fabric": "gloo", "hardware": "cpu"}, "no FSDP2 and takes each rank for the only process; use "),
        ("hf_fsdp2", {"method": "ulysses"}, "not method=ulysses; use method=torch_context_parallel"),
        ("hf_fsdp2", {"method": "ring"}, "not method=ring; use method=torch_context_parallel"),
        ("hf_fsdp2", {"method__layout": "contiguous"}, "leaves torch's load balancing on.* use method.layout=zigzag"),
        ("hf_fsdp2", {"kernel": "flash_attn"}, "runs sdpa, not kernel=flash_attn; use sdpa_flash or cudnn"),
        (
            "hf_fsdp2",
            PACKED | {"sp_size": 2},
            "takes no lengths of documents; use sp_size=1, or engine=hf_deepspeed with kernel=flash_attn",
        ),
        ("deepspeed", PACKED, "trains whole sequences here; use engine=fsdp2 or hf_deepspeed or hf_trainer or trl_sft"),
        ("megatron", MASKED, "trains on all labels here; use engine=fsdp2 or hf_deepspeed or hf_trainer or trl_sft"),
        ("hf_fsdp2", {"dtype": "float64"}, "float32 or bfloat16, not dtype=float64"),
        (
            "hf_fsdp2",
            {"sp_size": 1, "dp_shard_size": 2},
            "no context parallelism; use method=single, or sp_size of 2 or more",
        ),
        ("hf_fsdp2", {"sp_size": 1, "dp_shard_size": 1, "method": "single"}, "needs ranks to shard over"),
        ("hf_fsdp2", {"dp_replicate_size": 2}, "refuses replicas without dp_shard"),
        ("megatron", {"fabric": "gloo", "hardware": "cpu"}, "take tensors on CUDA only; use engine=fsdp2, or GPUs"),
        ("megatron", {"method": "ring"}, "not method=ring with variant=None; use method=transformer_engine"),
        (
            "megatron",
            {"method__variant": "a2a+p2p", "method__ulysses_degree": 2},
            "method.variant in p2p, all_gather, a2a",
        ),
        ("megatron", {"kernel": "sdpa_flash"}, "not kernel=sdpa_flash; use flash_attn or cudnn"),
        ("megatron", {"dtype": "float16"}, "trains in bfloat16, not dtype=float16"),
        ("megatron", {"dtype": "float32"}, "runs our methods on kernel=math"),
        ("megatron", {"dp_replicate_size": 2}, "shards its optimizer over all ranks; use dp_shard_size=2"),
        ("megatron", {"sp_size": 1, "dp_shard_size": 2}, "no context parallelism; use method=single"),
        ("megatron", {"engine__variable_seq_len": True}, "has neither optimizer_offload nor variable_"),
        ("hf_fsdp2", {"engine__optimizer_offload": "torch_adamw"}, "has neither optimizer_offload nor variable_"),
        ("hf_fsdp2", {"engine__reduce_gradients": "last_micro_batch"}, "nor reduce_gradients; leave them out"),
    ],
)
def test_what_an_engine_cannot_run_is_refused_with_the_way_out(make, name, changes, message):
    config = make(name, **changes)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(requirements.unsupported_reason(config))


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", OTHERS)
def test_a_first_step_that_peaks_below_later_ones_is_not_the_only_one(make, name):
    reason = f"the first step of engine {name} peaks below later ones; use workload.warmup_steps=1"
    first = SINGLE | {"workload__warmup_steps": 0}
    assert reason in str(requirements.unsupported_reason(make(name, **first)))
    assert reason not in str(requirements.unsupported_reason(make(name, **SINGLE)))


@pytest.mark.parametrize("name", HF_ON_ZERO_3)
def test_hugging_faces_stacks_run_at_their_best(make, monkeypatch, name):
    monkeypatch.setattr(hardware, "package_versions", lambda: VERSIONS | {"liger-kernel": "0.8.5"})
    best = FIT | FULL | {"kernel": "cudnn", "workload__model_code": "liger", "workload__mlp_tile_tokens": 64}
    if name == "hf_deepspeed":
        best["workload__loss_tile_tokens"] = 64
    assert requirements.unsupported_reason(make(name, **best)) is None


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", HF_ON_ZERO_3)
def test_hugging_faces_stacks_take_packs_and_masked_labels(make, name):
    for more in ({"method": "single", "sp_size": 1, "dp_shard_size": 2}, {}):
        for kernel in ("flash_attn", "math"):
            assert requirements.unsupported_reason(make(name, kernel=kernel, **PACKED, **MASKED, **more)) is None


@pytest.mark.usefixtures("libraries")
def test_accelerates_fsdp2_takes_packs_on_one_rank_and_masked_labels_on_several(make):
    alone = {"method": "single", "sp_size": 1, "dp_shard_size": 2, "kernel": "math"}
    assert requirements.unsupported_reason(make("hf_fsdp2", **PACKED, **MASKED, **alone)) is None
    assert requirements.unsupported_reason(make("hf_fsdp2", **MASKED)) is None


@pytest.mark.usefixtures("libraries")
def test_the_kernels_of_torchs_sdpa_are_not_proven_on_packs(make):
    for kernel in ("cudnn", "sdpa_flash"):
        config = make("hf_deepspeed", kernel=kernel, **PACKED)
        able = "math, cpu_flash, flash_attn, flash_attn_3, flash_attn_4"
        assert plan.unsupported_reason(config, 4) == f"kernel {kernel} takes no packed documents; use kernel={able}"
    reason = requirements.unsupported_reason(make("hf_deepspeed", kernel="cpu_flash", dtype="float32", **PACKED))
    assert "is proven with kernel=math and flash_attn, not cpu_flash" in str(reason)


@pytest.mark.usefixtures("libraries")
def test_on_packs_transformers_flash_attention_stays_in_the_float32_twin(make):
    def twin(name: str, **changes) -> tuple[str, str, str]:
        config, proven = float32_twin(make(name, **changes))
        return config.kernel.name, config.dtype, proven

    for name in HF_ON_ZERO_3:
        assert twin(name, **PACKED) == ("flash_attn", "float32", "method")
        assert twin(name, kernel="math", **PACKED) == twin(name) == ("math", "float32", "method")
    assert twin("fsdp2", method="ulysses", kernel="flash_attn", **PACKED) == ("math", "float32", "method")


def test_products_are_not_counted_where_attentions_are_among_them(make):
    for kernel, is_counted in (("math", False), ("flash_attn", True)):
        for name in ("hf_deepspeed", "fsdp2"):
            config = make(name, method="deepspeed_ulysses_hf", kernel=kernel)
            counted = closed_forms.expected_work(config, config.seq_len, 0).matmul_flops is not None
            assert counted == (is_counted or name == "fsdp2")


@given(num_tokens=st.integers(1, 300), tile_tokens=st.integers(1, 300), num_sequences=st.integers(1, 3))
def test_deepspeed_is_told_as_many_tiles_as_torch_makes(num_tokens, tile_tokens, num_sequences):
    number = zero3.num_tiles(num_tokens, tile_tokens)
    tiles = torch.arange(num_tokens).chunk(number)
    assert (len(tiles), max(map(len, tiles)) <= tile_tokens) == (number, True)
    # TiledMLP's backward cuts all sequences as one
    assert len(torch.arange(num_sequences * num_tokens).chunk(number)) == number


def test_a_tiled_mlp_keeps_nothing_of_its_input(monkeypatch):
    kept = []  # DeepSpeed's function is kept until the backward

    class TiledMLP:
        @staticmethod
        def apply(function, mlp, x, number, _):
            kept.append(function)
            return torch.cat([function(mlp, tile) for tile in x.chunk(number, dim=1)], dim=1)

    ulysses_sp = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    monkeypatch.setitem(sys.modules, ulysses_sp, SimpleNamespace(TiledMLP=TiledMLP))
    mlp = torch.nn.Linear(4, 4)
    zero3.tile_mlp(mlp, 3)
    x = torch.zeros(2, 8, 4)
    seen = weakref.ref(x)
    assert mlp(x).shape == x.shape
    del x
    assert kept
    assert seen() is None


def test_tiles_of_deepspeed_run_an_mlp_once_more(make):
    whole, tiled = (make("hf_deepspeed", **FULL, workload__mlp_tile_tokens=tile) for tile in (None, 64))
    mlps = 2 * 3 * whole.model.num_layers * whole.model.hidden_size * whole.model.intermediate_size
    once = mlps * whole.seq_len * whole.num_sequences
    assert training_costs.matmul_flops(tiled, tiled.seq_len) - training_costs.matmul_flops(whole, whole.seq_len) == once


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", ["hf_trainer", "trl_sft"])
def test_the_trainers_take_replicas_as_accelerate_does(make, name):
    assert requirements.unsupported_reason(make(name, sp_size=2, dp_replicate_size=2)) is None


@pytest.mark.usefixtures("libraries")
def test_trl_shares_two_sequences_on_a_cpu_where_the_trainer_alone_cannot(make):
    on_cpu = {"fabric": "gloo", "hardware": "cpu", "dtype": "float32", "kernel": "cpu_flash", "batch_size": 2}
    assert requirements.unsupported_reason(make("trl_sft", **on_cpu)) is None
    assert requirements.unsupported_reason(make("hf_trainer", **on_cpu)) is not None


def method_reason(config: TrialConfig) -> str | None:
    shape, method = config.attention_shape(config.seq_len), methods.get(config.method.name)
    return method.unsupported_reason(config.method, config.kernel.name, shape, config.sp_size)


LIBRARIES = VERSIONS | dict.fromkeys(("ring-flash-attn", "yunchang", "transformer-engine"), "1")


@pytest.mark.parametrize(
    ("method", "kernel", "changes", "ours"),
    [
        ("ulysses", "cudnn", {}, None),
        ("deepspeed_ulysses", "flash_attn", {}, None),
        ("deepspeed_ulysses_hf", "flash_attn", {}, None),
        ("ring_flash_attn", "flash_attn", {}, "ring"),
        ("ring_flash_attn_llama3", "flash_attn", {}, "ring"),
        ("torch_context_parallel", "sdpa_flash", {}, "ring"),
        ("yunchang", "flash_attn", {}, "usp"),
        ("yunchang", "flash_attn", {"method__placement": "ring_inner"}, "usp"),
        ("yunchang", "flash_attn", {"method__ulysses_degree": 4}, "ulysses"),
        ("transformer_engine", "cudnn", {}, "ring"),
        ("transformer_engine", "cudnn", {"method__variant": "a2a+p2p", "method__ulysses_degree": 2}, "usp"),
    ],
)
def test_a_step_in_half_precision_has_a_twin_in_float32_on_the_same_degrees(
    make, monkeypatch, method, kernel, changes, ours
):
    monkeypatch.setattr(hardware, "package_versions", lambda: LIBRARIES)
    config = make("fsdp2", method=method, kernel=kernel, model="llama3_8b", **changes)
    assert method_reason(config) is None
    twin, proven = float32_twin(config)
    assert (twin.dtype, twin.kernel.name, twin.engine) == ("float32", "math", config.engine)
    assert (twin.method.name, proven) == ((ours, "step_only") if ours else (method, "method"))
    assert method_reason(twin) is None
    cut, own = (methods.get(c.method.name).layout(c.method, c.sp_size) for c in (config, twin))
    assert (own.ring_degree, own.ulysses_degree) == (cut.ring_degree, cut.ulysses_degree)
    assert own.ulysses_inner == cut.ulysses_inner or 1 in (
        own.ring_degree,
        own.ulysses_degree,
    )  # so one mesh serves both


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", engines.NAMES)
def test_every_engine_trains_the_twin_in_float32(make, name):
    assert requirements.unsupported_reason(float32_twin(make(name))[0]) is None


def test_an_engine_that_cannot_train_in_float32_says_so_before_anything_runs(make, monkeypatch):
    low_only = SimpleNamespace(
        unsupported_reason=lambda config: None if config.dtype == "bfloat16" else "bfloat16 only"
    )
    monkeypatch.setattr(engines, "get_outside", lambda name: low_only)
    config = replace(make("fsdp2"), engine=EngineConfig("mine"))
    reason = requirements.unsupported_reason(config)
    assert reason == "a step in bfloat16 is proven in float32 too, and there: bfloat16 only"


@pytest.mark.parametrize("name", engines.NAMES)
def test_a_row_says_where_its_tokens_are_loaded(make, name):
    expected = "before" if name in ("fsdp2", "deepspeed", "megatron") else "in_step"
    assert asked_for(make(name))["batch_loading"] == expected


ON_CPU = {"hardware": "cpu", "fabric": "gloo", "dtype": "float32", "kernel": "math"}
THIRDS = {"workload__packing": "fixed", "workload__document_len": 48}


@pytest.mark.parametrize(
    ("changes", "unscored"),
    [
        (ON_CPU, 0),
        (ON_CPU | {"method": "single", "sp_size": 1}, 1),  # transformers' model shifts: the last token has no logits
        (ON_CPU | MASKED, 0),
        ({}, 1),  # on GPUs TRL takes out what has no label
        (MASKED, 48),
        (THIRDS, 2),
        (THIRDS | MASKED, 2 * 24),  # of the 47 labels of a document 23 are masked
    ],
)
def test_the_head_that_trl_computes_again_is_among_the_flops_that_ran(make, changes, unscored):
    ours, theirs = (make(name, seq_len=96, **changes) for name in ("hf_trainer", "trl_sft"))
    head = 2 * ours.model.vocab_size * ours.model.hidden_size * ours.batch_size
    more = training_costs.hardware_flops(theirs, 96) - training_costs.hardware_flops(ours, 96)
    assert more == head * (96 - 4 * unscored)
    assert training_costs.model_flops(theirs) == training_costs.model_flops(ours)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", [*HF_ON_ZERO_3, "hf_fsdp2", "megatron"])
def test_the_published_baseline_of_data_parallelism_alone_runs(make, name):
    assert (
        requirements.unsupported_reason(make(name, kernel="cudnn", method="single", sp_size=1, dp_shard_size=4)) is None
    )


def test_an_engine_is_refused_where_nothing_is_trained(make_config):
    with pytest.raises(ConfigError, match=r"engine=deepspeed: the attention workload trains nothing"):
        make_config(engine="deepspeed")


def test_an_adam_in_host_memory_is_no_sgd(make_config):
    with pytest.raises(ConfigError, match=r"is an Adam, not sgd; use workload\.optimizer=adamw"):
        make_config(workload="parity", engine="deepspeed", engine__optimizer_offload="torch_adamw")


def test_fsdp2_is_left_out_of_the_identity_and_every_other_engine_is_in_it(make):
    assert "engine" not in json.loads(plan.canonical(make("fsdp2")))
    assert json.loads(plan.canonical(make("deepspeed")))["engine"] == {"name": "deepspeed"}
    offloaded = make("deepspeed", engine__optimizer_offload="torch_adamw")
    configs = [make("fsdp2"), make("deepspeed"), offloaded, make("hf_deepspeed", method="ulysses", kernel="cpu_flash")]
    assert len({plan.cell_id(config) for config in configs}) == len(configs)


@pytest.mark.parametrize("name", engines.NAMES)
def test_a_canonical_config_reads_back_with_its_engine(make, name):
    config = make(name)
    assert parse(TrialConfig, json.loads(plan.canonical(config))) == config


def test_identities_of_before_there_were_engines_hold(make_config):
    """Computed from the tree before: an old row is still the row of its cell."""
    assert plan.cell_id(make_config()) == "f9a1bc35338a"
    assert plan.cell_id(make_config(workload="train_step", workload__learning_rate=1e-4)) == "2eb7e912ac74"


@pytest.mark.usefixtures("libraries")
def test_a_row_names_engine_and_libraries(make):
    columns = asked_for(make("hf_trainer", engine__optimizer_offload="torch_adamw"))
    assert columns["engine"] == "hf_trainer"
    assert columns["engine_implementation"] == "deepspeed==0.19.8 transformers==5.17.0 accelerate==1.15.0"
    assert columns["optimizer_offload"] == "torch_adamw"
    assert asked_for(make("fsdp2"))["engine_implementation"] == "sp_bench"


def test_a_row_of_attention_alone_has_no_engine(make_config):
    columns = asked_for(make_config())
    assert (columns["engine"], columns["engine_implementation"]) == (None, None)


@pytest.mark.parametrize("name", engines.NAMES)
def test_planning_an_engine_imports_no_library(make, name):
    code = (
        "import json, sys\n"
        "from sp_bench.planning import plan\nfrom sp_bench.config.trial import TrialConfig\n"
        "from sp_bench.config.parsing import parse\n"
        "plan.unsupported_reason(parse(TrialConfig, json.load(sys.stdin)), None)\n"
        "names = {'torch', 'deepspeed', 'transformers', 'accelerate', 'trl', 'datasets', 'megatron'}\n"
        "print(*names & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=plan.canonical(make(name)), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "qkv_bias": True}, {"tie_embeddings": True}])
def test_each_parameter_has_a_name_of_its_own_at_transformers(make_config, changes):
    from sp_bench.engines.hugging_face import their_name

    config = replace(make_config().model, **changes)
    ours = [name for name, _ in model.Decoder(config, lambda q, k, v: q).named_parameters()]
    theirs = [their_name(name) for name in ours]
    assert len(set(theirs)) == len(ours)
    assert "model.layers.1.mlp.down_proj.weight" in theirs


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"qkv_bias": True}, {"tie_embeddings": True}])
@pytest.mark.parametrize("fused_norms", [True, False])
def test_our_parameters_fill_each_row_of_megatrons_once(make_config, changes, fused_norms):
    from sp_bench.engines import megatron

    config = replace(make_config().model, **changes)
    shapes = {name: p.shape for name, p in model.Decoder(config, lambda q, k, v: q).named_parameters()}
    places = megatron.places(config, fused_norms=fused_norms)
    assert places.keys() == shapes.keys()
    rows: dict[str, list[int]] = {}
    for name, place in places.items():
        mine = list(range(shapes[name][0])) if place.rows is None else place.rows.tolist()
        assert len(mine) == shapes[name][0]
        rows.setdefault(place.name, []).extend(mine)
    assert all(sorted(found) == list(range(len(found))) for found in rows.values())
    both = config.num_heads + 2 * config.num_kv_heads
    assert len(rows["decoder.layers.0.self_attention.linear_qkv.weight"]) == both * config.head_dim


@pytest.mark.parametrize(("start", "end"), [(0, 24), (5, 17), (0, 0), (23, 24)])
def test_a_stretch_of_a_flat_matrix_has_the_elements_of_these_rows_in_order(start, end):
    from sp_bench.engines import megatron

    matrix = torch.arange(24).view(6, 4)
    index = megatron._within(torch.tensor([1, 2, 5]), 4, start, end)
    wanted = [value for value in matrix[[1, 2, 5]].flatten().tolist() if start <= value < end]
    assert matrix.flatten()[start:end][index].tolist() == wanted


def test_the_default_engine_is_fsdp2(make_config):
    assert make_config().engine == EngineConfig()


def test_caches_of_a_librarys_methods_are_found_behind_decorators_in_frozen_memory() -> None:
    """As DeepSpeed hides the one that keeps models, and as the worker freezes its modules."""

    def decorated(function):
        def inside(*args):
            return function(*args)

        return inside

    module = ModuleType("library")
    plain, hidden, foreign = (lru_cache(lambda self: self) for _ in range(3))
    plain.__module__ = hidden.__module__ = "library"
    coordinator = type("Coordinator", (), {"plain": plain, "hidden": decorated(decorated(hidden))})
    coordinator.__module__ = "library"
    vars(module).update(Coordinator=coordinator, imported=foreign, again=hidden)
    try:
        gc.freeze()
        assert all(each is not hidden for each in gc.get_objects()), "frozen objects are listed: this says nothing"
        found = zero3._caches(module)
    finally:
        gc.unfreeze()
    assert len(found) == 2
    assert all(each is plain or each is hidden for each in found)


@pytest.mark.usefixtures("libraries")
def test_megatron_is_not_asked_for_flash_attention_2_where_transformer_engine_would_run_4(make, monkeypatch):
    two = make("megatron", kernel="flash_attn")
    assert requirements.unsupported_reason(two) is None
    monkeypatch.setattr(hardware, "package_versions", lambda: VERSIONS | {"flash-attn-4": "4.0.0b29"})
    assert "uninstall flash-attn-4, or use kernel=cudnn" in str(requirements.unsupported_reason(two))
    assert requirements.unsupported_reason(make("megatron")) is None


def test_options_of_fsdp2_that_change_nothing_are_refused(make):
    alone = make("fsdp2", method="ulysses", engine__reduce_gradients="last_micro_batch")
    assert "use workload.micro_batches of 2 or more" in str(requirements.unsupported_reason(alone))
    whole = make("fsdp2", method="ulysses", engine__reshard_after_forward=False, engine__backward_prefetch=2)
    assert "the backward gathers nothing" in str(requirements.unsupported_reason(whole))


def test_the_memory_model_says_nothing_of_parameters_and_gradients_that_stay_whole(make):
    plain = make("fsdp2", method="ulysses")
    assert memory.unmodelled_reason(plain) is None
    whole = {"engine__reshard_after_forward": False, "engine__reduce_gradients": "last_micro_batch"}
    reason = memory.unmodelled_reason(make("fsdp2", method="ulysses", workload__micro_batches=2, **whole))
    assert reason is not None
    assert "reshard_after_forward=false and engine.reduce_gradients=last_micro_batch" in reason


@pytest.mark.parametrize(
    ("name", "sp_size", "micro_batches", "dp_shard_size", "expected"),
    [
        ("hf_deepspeed", 1, 2, 1, True),
        ("hf_deepspeed", 2, 1, 2, True),
        ("hf_deepspeed", 2, 1, 1, False),  # one mean
        ("hf_trainer", 1, 2, 2, False),  # it divides by all labels
        ("hf_trainer", 2, 2, 1, True),
        ("trl_sft", 2, 2, 1, True),
        ("hf_fsdp2", 2, 2, 2, False),
        ("deepspeed", 2, 2, 2, False),
    ],
)
def test_which_stacks_take_a_mean_of_means(make_config, name, sp_size, micro_batches, dp_shard_size, expected):
    method = "single" if sp_size == 1 else "deepspeed_ulysses_hf"
    shape = {"sp_size": sp_size, "dp_shard_size": dp_shard_size, "workload__micro_batches": micro_batches}
    config = make_config(workload="train_step", engine=name, method=method, **shape)
    assert training_costs.takes_mean_of_means(config) == expected
