"""What the adapters to other libraries say before anything is launched: reasons and bytes, without the library."""

import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import costs, hardware, methods, plan
from sp_bench.config import AttentionShape, MethodConfig
from sp_bench.parsing import ConfigError

ADAPTERS = {"ring_flash_attn": "ring-flash-attn", "deepspeed_ulysses": "deepspeed"}
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


def test_ring_flash_attn_without_transformers_says_so(libraries):
    del libraries["transformers"]
    assert "needs transformers: pip install" in str(reason(MethodConfig("ring_flash_attn"), "flash_attn", GQA, 8))


@pytest.mark.parametrize("name", ADAPTERS)
def test_planning_an_adapter_imports_no_library(make_config, name):
    code = (
        "import sys\n"
        "from sp_bench import plan\nfrom sp_bench.config import TrialConfig\nfrom sp_bench.parsing import parse\n"
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
    expected = f"ring_flash_attn brings its own kernel, not kernel={kernel}; use kernel=flash_attn"
    assert reason(MethodConfig("ring_flash_attn", "zigzag"), kernel, GQA, 8) == expected
    assert reason(MethodConfig("deepspeed_ulysses"), kernel, GQA, 8) is None


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


def test_deepspeed_has_one_layout():
    with pytest.raises(ConfigError, match=r"method\.layout=zigzag: deepspeed_ulysses"):
        methods.get("deepspeed_ulysses").layout(MethodConfig("deepspeed_ulysses", "zigzag"), 2)


@given(st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(2, 64), st.integers(1, 8))
def test_ring_flash_attn_sends_dkv_a_hop_further_than_ours_and_in_fp32(layout, sp_size, kv_heads):
    shape = AttentionShape(1, 2 * sp_size, 8 * kv_heads, kv_heads, 16, True, "bfloat16")
    theirs = methods.get("ring_flash_attn").traffic(MethodConfig("ring_flash_attn", layout), shape, sp_size)
    ours = costs.ring_traffic(shape, sp_size, 1, "float32")
    hop = costs.kv_shard_elements(shape, sp_size) * 4
    assert theirs["forward", "send"] == ours["forward", "send"]
    assert theirs["backward", "send"] == ours["backward", "send"] + hop


def test_at_the_headline_shape_the_libraries_send_the_published_mebibytes():
    mib = {
        name: sum(methods.get(name).traffic(MethodConfig(name), GQA, 8).values(), Fraction(0)) / 2**20
        for name in ADAPTERS
    }
    assert mib == {"ring_flash_attn": 1920, "deepspeed_ulysses": 560}


def test_a_row_names_the_library_and_its_version(libraries):
    assert methods.installed("deepspeed") == "deepspeed==0.19.8"
    libraries.clear()
    assert methods.installed("deepspeed") == "deepspeed"
    for name, package in ADAPTERS.items():
        assert methods.get(name).IMPLEMENTATION.split("==")[0] == package
