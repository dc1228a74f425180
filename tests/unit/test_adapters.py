"""What the adapters to other libraries say before anything is launched: reasons and bytes, without the library."""

import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import hardware, methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.shape import AttentionShape
from sp_bench.costs import attention as attention_costs
from sp_bench.methods import closed_forms
from sp_bench.planning import plan

ADAPTERS = {
    "ring_flash_attn": "ring-flash-attn",
    "ring_flash_attn_llama3": "ring-flash-attn",
    "deepspeed_ulysses": "deepspeed",
    "deepspeed_ulysses_hf": "deepspeed",
}
GQA = AttentionShape(1, 131_072, 32, 8, 128, True, "bfloat16")


@pytest.fixture
def libraries(monkeypatch):
    """As if they were installed."""
    versions = {"ring-flash-attn": "0.1.8", "transformers": "5.17.0", "deepspeed": "0.19.8"}
    monkeypatch.setattr(hardware, "package_versions", lambda: versions)
    return versions


def reason(method: MethodConfig, kernel: str, shape: AttentionShape, sp_size: int) -> str | None:
    return methods.get(method.name).unsupported_reason(method, kernel, shape, sp_size)


@pytest.mark.parametrize(("name", "package"), ADAPTERS.items())
def test_a_missing_library_is_a_reason_that_names_the_extra(monkeypatch, name, package):
    monkeypatch.setattr(hardware, "package_versions", dict)
    found = str(reason(MethodConfig(name), "flash_attn", GQA, 8))
    assert f"needs {package}" in found
    assert f"pip install 'sp-bench[{package}]'" in found


@pytest.mark.parametrize("name", ["ring_flash_attn", "ring_flash_attn_llama3", "deepspeed_ulysses_hf"])
def test_an_adapter_that_needs_transformers_says_so(libraries, name):
    assert reason(MethodConfig(name), "flash_attn", GQA, 8) is None
    del libraries["transformers"]
    assert "needs transformers: pip install" in str(reason(MethodConfig(name), "flash_attn", GQA, 8))


@pytest.mark.parametrize("name", ADAPTERS)
def test_planning_an_adapter_imports_no_library(make_config, name):
    code = (
        "import sys\n"
        "from sp_bench.planning import plan\nfrom sp_bench.config.trial import TrialConfig\n"
        "from sp_bench.config.parsing import parse\n"
        "import json\n"
        "plan.unsupported_reason(parse(TrialConfig, json.load(sys.stdin)), None)\n"
        "print(*{'torch', 'deepspeed', 'ring_flash_attn', 'transformers', 'flash_attn'} & set(sys.modules))\n"
    )
    config = plan.canonical(make_config(method=name))
    done = subprocess.run([sys.executable, "-c", code], input=config, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("kernel", ["math", "cudnn", "flash_attn_4"])
def test_ring_flash_attn_runs_on_no_kernel_but_its_own(kernel):
    for name in ("ring_flash_attn", "ring_flash_attn_llama3"):
        expected = f"{name} brings its own kernel, not kernel={kernel}; use kernel=flash_attn"
        assert reason(MethodConfig(name), kernel, GQA, 8) == expected
    for name in ("deepspeed_ulysses", "deepspeed_ulysses_hf"):
        assert reason(MethodConfig(name), kernel, GQA, 8) is None


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("layout", "runs"), [("contiguous", True), ("zigzag", False), ("striped", False)])
def test_only_the_contiguous_ring_of_ring_flash_attn_runs_without_a_mask(layout, runs):
    full = AttentionShape(1, 1024, 32, 8, 128, False, "bfloat16")
    found = reason(MethodConfig("ring_flash_attn", layout), "flash_attn", full, 8)
    assert found is None if runs else "causal only; use method.layout=contiguous" in str(found)
    assert reason(MethodConfig("ring_flash_attn", layout), "flash_attn", GQA, 8) is None


@pytest.mark.usefixtures("libraries")
def test_a_ring_flash_attn_of_one_rank_is_refused():
    assert "sp_size of 2 or more" in str(reason(MethodConfig("ring_flash_attn"), "flash_attn", GQA, 1))


@pytest.mark.usefixtures("libraries")
def test_deepspeed_takes_any_sp_size_up_to_its_kv_heads():
    deepspeed = MethodConfig("deepspeed_ulysses")
    assert [p for p in range(1, 17) if reason(deepspeed, "flash_attn", GQA, p) is None] == list(range(1, 9))
    assert "num_kv_heads=8 is fewer than sp_size=16" in str(reason(deepspeed, "flash_attn", GQA, 16))


@pytest.mark.usefixtures("libraries")
def test_deepspeed_for_hugging_face_replicates_kv_heads_and_splits_none_unevenly():
    method = MethodConfig("deepspeed_ulysses_hf")
    assert [p for p in range(1, 65) if reason(method, "cudnn", GQA, p) is None] == [1, 2, 4, 8, 16, 32]
    found = "num_heads=32 cannot be split over sp_size=3 for deepspeed_ulysses_hf; use sp_size in {1, 2, 4, 8, 16, 32}"
    assert str(reason(method, "cudnn", GQA, 3)).startswith(found)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_deepspeed_for_hugging_face_sends_what_ulysses_does_and_eight_bytes_a_position(sp_size, kv_heads, batch):
    shape = AttentionShape(batch, 16 * sp_size, 8, kv_heads, 16, True, "bfloat16")
    theirs = closed_forms.traffic("deepspeed_ulysses_hf")(MethodConfig("deepspeed_ulysses_hf"), shape, sp_size)
    positions = {("forward", "all_gather"): Fraction(8 * batch * 16 * (sp_size - 1))}
    assert theirs == attention_costs.add_traffic(attention_costs.ulysses_traffic(shape, sp_size, sp_size), positions)


@pytest.mark.usefixtures("libraries")
def test_the_gather_of_ring_flash_attn_takes_strides_that_divide_the_kv_heads_and_one_sequence():
    def of(stride: int | None, batch: int = 1, sp_size: int = 8) -> str | None:
        shape = AttentionShape(batch, 4096, 32, 8, 128, False, "bfloat16")
        return reason(MethodConfig("ring_flash_attn_llama3", head_stride=stride), "flash_attn", shape, sp_size)

    assert [stride for stride in (None, *range(1, 10)) if of(stride) is None] == [None, 1, 2, 4, 8]
    assert of(3) == "method.head_stride=3 does not divide num_kv_heads=8; use one of {1, 2, 4, 8}"
    assert "batch_size=2" in str(of(1, batch=2))
    assert "use batch_size=1, or method=all_gather" in str(of(1, batch=2))
    assert of(1, sp_size=1) is None


@pytest.mark.parametrize("name", ["deepspeed_ulysses", "deepspeed_ulysses_hf", "ring_flash_attn_llama3"])
@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_these_have_one_layout(name, kind):
    with pytest.raises(ConfigError, match=rf"method\.layout={kind}: {name} .* use contiguous"):
        methods.get(name).layout(MethodConfig(name, kind), 2)


@given(st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(2, 64), st.integers(1, 8))
def test_ring_flash_attn_sends_dkv_a_hop_further_than_ours_and_in_fp32(layout, sp_size, kv_heads):
    shape = AttentionShape(1, 2 * sp_size, 8 * kv_heads, kv_heads, 16, True, "bfloat16")
    theirs = closed_forms.traffic("ring_flash_attn")(MethodConfig("ring_flash_attn", layout), shape, sp_size)
    ours = attention_costs.ring_traffic(shape, sp_size, 1, "float32")
    hop = attention_costs.kv_shard_elements(shape, sp_size) * 4
    assert theirs["forward", "send"] == ours["forward", "send"]
    assert theirs["backward", "send"] == ours["backward", "send"] + hop


def test_at_the_headline_shape_the_libraries_send_the_published_mebibytes():
    mib = {
        name: sum(closed_forms.traffic(name)(MethodConfig(name), GQA, 8).values(), Fraction(0)) / 2**20
        for name in ADAPTERS
    }
    assert mib == {
        "ring_flash_attn": 1920,
        "ring_flash_attn_llama3": 1344,
        "deepspeed_ulysses": 560,
        "deepspeed_ulysses_hf": 560 + 0.875,  # and the positions
    }


def test_a_row_names_the_library_and_its_version(libraries):
    assert methods.installed("deepspeed") == "deepspeed==0.19.8"
    libraries.clear()
    assert methods.installed("deepspeed") == "deepspeed"
    for name, package in ADAPTERS.items():
        assert methods.get(name).IMPLEMENTATION.split("==")[0] == package


@pytest.mark.parametrize("kernel", ["math", "cpu_flash", "flash_attn", "flash_attn_4"])
def test_torch_context_parallel_runs_on_the_backends_of_sdpa_that_it_shards(kernel):
    method = MethodConfig("torch_context_parallel", "zigzag", "allgather")
    assert "use kernel=sdpa_flash or cudnn" in str(reason(method, kernel, GQA, 8))
    assert reason(method, "sdpa_flash", GQA, 8) is None
    assert reason(method, "cudnn", GQA, 8) is None


def test_the_load_balancing_of_torch_context_parallel_is_causal_only():
    full = AttentionShape(1, 1024, 32, 8, 128, False, "bfloat16")
    found = str(reason(MethodConfig("torch_context_parallel", "zigzag", "alltoall"), "cudnn", full, 8))
    assert "causal only; use method.layout=contiguous" in found
    assert reason(MethodConfig("torch_context_parallel", "contiguous", "alltoall"), "cudnn", full, 8) is None
    with pytest.raises(
        ConfigError, match=r"method\.layout=striped: torch_context_parallel has .*; use contiguous or zigzag"
    ):
        methods.get("torch_context_parallel").layout(MethodConfig("torch_context_parallel", "striped", "alltoall"), 8)


@given(st.integers(1, 64), st.integers(1, 8), st.sampled_from(["contiguous", "zigzag"]))
def test_torch_context_parallel_sends_as_ring_flash_attn_does_whichever_way_it_rotates(sp_size, kv_heads, layout):
    shape = AttentionShape(1, 2 * sp_size, 8 * kv_heads, kv_heads, 16, True, "bfloat16")
    name = "torch_context_parallel"
    gathered, handed_on = (
        closed_forms.traffic(name)(MethodConfig(name, layout, variant), shape, sp_size)
        for variant in ("allgather", "alltoall")
    )
    assert gathered.get(("forward", "all_gather")) == handed_on.get(("forward", "all_to_all"))
    assert sum(gathered.values()) == sum(handed_on.values())
    hops = sp_size if sp_size > 1 else 0
    ring = attention_costs.ring_traffic(shape, sp_size, 1, "float32", dkv_hops=hops)
    assert sum(handed_on.values()) == sum(ring.values())
