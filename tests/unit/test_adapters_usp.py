"""What the adapters to yunchang and TransformerEngine say before anything is launched, without the libraries."""

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import hardware, methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.shape import AttentionShape
from sp_bench.costs import attention as attention_costs
from sp_bench.methods import closed_forms, refusals
from sp_bench.planning import plan

PACKAGES = {"yunchang": "yunchang", "transformer_engine": "transformer-engine"}
GQA = AttentionShape(1, 131_072, 32, 8, 128, True, "bfloat16")
FULL = AttentionShape(1, 131_072, 32, 8, 128, False, "bfloat16")
VARIANTS = [("p2p", None), ("all_gather", None), ("a2a", None), ("a2a+p2p", 2)]


def yunchang(
    layout="zigzag", variant: str | None = "usp", degree: int | None = None, placement="ulysses_inner"
) -> MethodConfig:
    return MethodConfig("yunchang", layout, variant, degree, placement)


def engine(variant: str | None = "p2p", degree: int | None = None, layout="zigzag", placement=None) -> MethodConfig:
    return MethodConfig("transformer_engine", layout, variant, degree, placement)


@pytest.fixture
def libraries(monkeypatch):
    """As if they were installed."""
    versions = {"yunchang": "0.6.4", "transformer-engine": "2.9.0"}
    monkeypatch.setattr(hardware, "package_versions", lambda: versions)


def reason(method: MethodConfig, kernel: str, shape: AttentionShape, sp_size: int) -> str | None:
    return methods.get(method.name).unsupported_reason(method, kernel, shape, sp_size)


def mebibytes(method: MethodConfig, sp_size: int) -> Fraction:
    return sum(closed_forms.traffic(method.name)(method, GQA, sp_size).values(), Fraction(0)) / 2**20


@pytest.mark.parametrize(("name", "package"), PACKAGES.items())
def test_a_missing_library_is_a_reason_that_names_the_extra(monkeypatch, name, package):
    monkeypatch.setattr(hardware, "package_versions", dict)
    found = str(reason(MethodConfig(name), "flash_attn", GQA, 8))
    assert f"needs {package}: pip install 'sp-bench[{package}]'" in found


@pytest.mark.parametrize("name", PACKAGES)
def test_planning_an_adapter_imports_no_library(make_config, name):
    code = (
        "import json, sys\nfrom sp_bench.planning import plan\nfrom sp_bench.config.trial import TrialConfig\n"
        "from sp_bench.config.parsing import parse\n"
        "plan.unsupported_reason(parse(TrialConfig, json.load(sys.stdin)), None)\n"
        "print(*{'torch', 'yunchang', 'transformer_engine', 'flash_attn'} & set(sys.modules))\n"
    )
    config = plan.canonical(make_config(method=name))
    done = subprocess.run([sys.executable, "-c", code], input=config, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.usefixtures("libraries")
def test_kernels_that_the_libraries_cannot_differentiate_are_refused():
    taken = {
        method.name: [k for k in ("math", "sdpa_flash", "cudnn", "flash_attn") if reason(method, k, GQA, 8) is None]
        for method in (yunchang(), engine())
    }
    assert taken == {"yunchang": ["flash_attn"], "transformer_engine": ["cudnn", "flash_attn"]}
    assert "its torch attention has none" in str(reason(yunchang(), "cudnn", GQA, 8))


@pytest.mark.usefixtures("libraries")
def test_transformer_engine_takes_packs_with_each_document_cut_and_gathers_keys_for_kernels_that_take_offsets():
    pack = replace(GQA, documents=(65_536, 32_768, 32_768))
    packed = {variant: engine(variant, degree, "document_zigzag") for variant, degree in VARIANTS}
    taken = {
        variant: [k for k in ("cudnn", "flash_attn", "flash_attn_4") if reason(method, k, pack, 4) is None]
        for variant, method in packed.items()
    }
    everything = ["cudnn", "flash_attn", "flash_attn_4"]
    assert taken == {
        "p2p": everything,
        "all_gather": ["cudnn", "flash_attn_4"],
        "a2a": everything,
        "a2a+p2p": ["cudnn", "flash_attn"],
    }
    assert "use kernel=flash_attn_4 or cudnn, or method.variant=p2p or a2a" in str(
        reason(packed["all_gather"], "flash_attn", pack, 4)
    )
    assert reason(packed["p2p"], "flash_attn", pack, 16) is None  # whose documents are padded
    assert refusals.packing_reason(packed["p2p"], pack) is None
    assert "use method.layout=document_zigzag" in str(refusals.packing_reason(engine(), pack))
    assert "use method.layout=zigzag" in str(refusals.packing_reason(packed["p2p"], GQA))


@pytest.mark.usefixtures("libraries")
def test_its_own_cudnn_attention_takes_packs_and_that_of_aten_does_not(make_config):
    fixed = {"workload__packing": "fixed", "workload__document_len": 256, "dtype": "bfloat16", "kernel": "cudnn"}
    theirs = make_config(method="transformer_engine", method__layout="document_zigzag", sp_size=2, **fixed)
    assert plan.unsupported_reason(theirs, None) == "kernel cudnn runs on CUDA only; use kernel=cpu_flash or math"
    ours = make_config(method="ring", method__layout="document_zigzag", sp_size=2, **fixed)
    assert "kernel cudnn takes no packed documents" in str(plan.unsupported_reason(ours, None))


@pytest.mark.usefixtures("libraries")
def test_balanced_rings_of_yunchang_are_causal_only_and_those_of_transformer_engine_are_not():
    assert reason(yunchang("contiguous"), "flash_attn", FULL, 8) is None
    for layout in ("zigzag", "striped"):
        assert "causal only; use method.layout=contiguous" in str(reason(yunchang(layout), "flash_attn", FULL, 8))
    for variant in ("p2p", "all_gather", "a2a"):
        assert reason(engine(variant), "flash_attn", FULL, 8) is None


@pytest.mark.usefixtures("libraries")
def test_degrees_divide_the_ranks_and_the_kv_heads():
    fits = [d for d in range(1, 25) if reason(yunchang(degree=d), "flash_attn", GQA, 24) is None]
    assert fits == [1, 2, 4, 8]
    found = str(reason(yunchang(degree=16), "flash_attn", GQA, 16))
    assert "method.ulysses_degree=16 must divide sp_size=16, num_heads=32 and num_kv_heads=8" in found
    assert "method.ulysses_degree in {1, 2, 4, 8}, or method=usp" in found
    fits = [d for d in range(1, 17) if reason(engine("a2a+p2p", d), "cudnn", GQA, 16) is None]
    assert fits == [2, 4, 8]
    assert "method.ulysses_degree in {2, 4}, or method.variant=p2p" in str(
        reason(engine("a2a+p2p", 8), "cudnn", GQA, 8)
    )
    assert [p for p in range(2, 17) if reason(engine("a2a"), "cudnn", GQA, p) is None] == [2, 4, 8]
    assert "sp_size=16 must divide num_heads=32 and num_kv_heads=8" in str(reason(engine("a2a"), "cudnn", GQA, 16))
    assert "its kernel alone; use sp_size of 2 or more" in str(reason(engine(), "cudnn", GQA, 1))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (yunchang("contiguous", "ulysses", 2), r"method\.ulysses_degree=2: variant ulysses of yunchang"),
        (yunchang("zigzag", "ulysses"), r"method\.layout=zigzag: variant ulysses of yunchang"),
        (engine(layout="contiguous"), r"method\.layout=contiguous: transformer_engine has one layout"),
        (engine(placement="ring_inner"), r"method\.placement=ring_inner: transformer_engine"),
        (engine("a2a", 2), r"method\.ulysses_degree=2: variant a2a of transformer_engine has no degrees"),
        (engine("a2a+p2p"), r"method\.ulysses_degree must be given for variant a2a\+p2p"),
    ],
)
def test_options_that_no_shape_makes_valid_are_errors(method, message):
    with pytest.raises(ConfigError, match=message):
        methods.get(method.name).layout(method, 4)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_unknown_variant_names_the_known_ones(name):
    with pytest.raises(
        ConfigError, match=r"method\.variant=ring: .* has (usp, ulysses|p2p, all_gather, a2a, a2a\+p2p)"
    ):
        methods.primitive(MethodConfig(name, variant="ring"))


@pytest.mark.parametrize(("variant", "degree"), VARIANTS)
def test_transformer_engine_gives_each_rank_of_each_document_what_zigzag_would(variant, degree):
    packed = methods.get("transformer_engine").layout(engine(variant, degree, "document_zigzag"), 4)
    layout = replace(packed, documents=(16, 32))
    assert layout.global_positions(1, 48) == [2, 3, 12, 13, *(16 + p for p in (4, 5, 6, 7, 24, 25, 26, 27))]
    assert sorted(p for rank in range(4) for p in layout.global_positions(rank, 48)) == list(range(48))


@pytest.mark.parametrize("method", [engine(variant, degree) for variant, degree in VARIANTS])
def test_transformer_engine_gives_each_rank_a_chunk_and_its_mirror_whatever_exchanges_heads(method):
    layout = methods.get(method.name).layout(method, 4)
    assert layout.sp_size == 4
    assert layout.global_positions(1, 16) == [2, 3, 12, 13]
    assert sorted(p for rank in range(4) for p in layout.global_positions(rank, 16)) == list(range(16))
    assert layout.unsupported_reason(20)
    # the heads' exchange of two adjacent ranks, its chunks put in order, gives a shard of a zigzag over two
    pair = sorted(p for rank in (0, 1) for p in layout.global_positions(rank, 16))
    assert pair == [0, 1, 2, 3, 12, 13, 14, 15]


def test_at_the_headline_shape_the_libraries_send_these_mebibytes():
    assert mebibytes(yunchang("contiguous", "ulysses"), 8) == mebibytes(yunchang(degree=8), 8) == 560
    assert mebibytes(yunchang(degree=1), 8) == mebibytes(MethodConfig("ring_flash_attn", "zigzag"), 8) == 1920
    assert mebibytes(engine("p2p"), 8) == mebibytes(engine("all_gather"), 8) == 1344
    assert mebibytes(engine("a2a"), 8) == 560


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["contiguous", "zigzag", "striped"]), st.booleans())
def test_yunchang_sends_what_our_usp_does_and_dkv_a_hop_further_in_fp32(degree, layout, inner):
    placement = "ulysses_inner" if inner else "ring_inner"
    theirs = closed_forms.traffic("yunchang")(yunchang(layout, "usp", degree, placement), GQA, 8)
    ours = closed_forms.traffic("usp")(MethodConfig("usp", layout, None, degree, placement, "float32"), GQA, 8)
    hop = attention_costs.kv_shard_elements(GQA, 8 // degree, degree) * 4
    assert theirs == attention_costs.add_traffic(ours, {("backward", "send"): hop if degree < 8 else Fraction(0)})


@given(st.sampled_from([2, 4]))
def test_transformer_engine_sends_what_our_usp_does(degree):
    theirs = closed_forms.traffic("transformer_engine")(engine("a2a+p2p", degree), GQA, 8)
    ours = closed_forms.traffic("usp")(MethodConfig("usp", "zigzag", None, degree, None, "input"), GQA, 8)
    assert theirs == ours
