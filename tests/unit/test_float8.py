"""Products in FP8: whose cell a trial is, what refuses them, what they cost, and the reference that rounds by casts."""

import re

import pytest
import torch

from sp_bench import hardware
from sp_bench.config.options import canonical
from sp_bench.config.parsing import ConfigError
from sp_bench.costs.training import matmul_flops, matmul_flops_by_dtype, num_parameters, sharding_traffic
from sp_bench.engines import requirements
from sp_bench.oracle.quantised import RECIPES, product, rounded

KINDS = ("float8_rowwise", "float8_tensorwise")
MEGATRON = {
    "engine": "megatron",
    "hardware": "h200",
    "fabric": "nvlink",
    "kernel": "cudnn",
    "method": "single",
    "sp_size": 1,
}
STEP = {"workload": "train_step", "dtype": "bfloat16", "seq_len": 256}


@pytest.fixture
def make(make_config, monkeypatch):
    """A trial with products in FP8; torchao need not be installed."""
    monkeypatch.setattr(hardware, "missing_packages", lambda *names: [])
    return lambda **options: make_config(**STEP | {"workload__linear_dtype": KINDS[0]} | options)


def test_products_in_the_dtype_are_the_cell_of_old_rows_and_those_in_fp8_are_not(make):
    plain, *others = (canonical(make(workload__linear_dtype=kind)) for kind in ("model", *KINDS))
    assert "linear_dtype" not in plain
    assert len({plain, *others}) == 3


def test_a_workload_without_steps_has_no_layers_to_multiply(make):
    with pytest.raises(
        ConfigError, match=r"workload\.linear_dtype=float8_rowwise: workload attention takes no optimizer"
    ):
        make(workload="attention")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"dtype": "float32"},
            "dtype=float32 is not proven in FP8; use dtype=bfloat16, or workload.linear_dtype=model",
        ),
        ({"batch_size": 2}, "batch_size=2 is not proven"),
        ({"workload__mlp_tile_tokens": 8, "workload__activation_checkpointing": "full"}, "use .*mlp_tile_tokens=null"),
        ({"sp_size": 2, "method": "ulysses", "seq_len": 240}, "seq_len=240 is not a multiple of 32"),
        ({"model__intermediate_size": 200}, "model.intermediate_size=200 is not a multiple of 16"),
        ({"engine": "megatron"}, "TransformerEngine has no such recipe; use float8_tensorwise"),
        ({"workload__linear_dtype": "float8_blockwise"}, "are a prototype; use engine=megatron, or float8_rowwise"),
        (
            MEGATRON | {"workload__linear_dtype": "float8_blockwise", "model__hidden_size": 192},
            "hidden_size=192 is not a multiple of 128",
        ),
        ({"engine": "deepspeed"}, "engine deepspeed would keep all gathered matrices .*; use model, or engine=fsdp2"),
        ({"engine": "hf_fsdp2"}, "engine hf_fsdp2 runs layers without torch.compile"),
        (
            {"workload__linear_dtype": KINDS[1], "sp_size": 2, "method": "ulysses", "dp_shard_size": 3},
            "192 rows|32 rows",
        ),
    ],
)
def test_what_is_not_proven_in_fp8_is_refused_with_a_way_out(make, options, reason):
    assert requirements.unsupported_reason(make()) is None
    assert re.search(reason, str(requirements.unsupported_reason(make(**options))))


def test_without_torchao_a_trial_is_unsupported(make, monkeypatch):
    monkeypatch.setattr(hardware, "missing_packages", lambda *names: [*names])
    assert requirements.unsupported_reason(make(workload__linear_dtype="model")) is None
    needs = "workload.linear_dtype=float8_rowwise needs torchao: pip install 'sp-bench[float8]'"
    assert requirements.unsupported_reason(make()) == needs


@pytest.mark.parametrize(
    ("engine", "kind", "capability", "least"),
    [
        ("fsdp2", KINDS[0], (8, 0), "8.9"),
        ("fsdp2", KINDS[0], (8, 9), None),
        ("megatron", "float8_blockwise", (8, 9), "9.0"),
        ("megatron", "float8_blockwise", (9, 0), None),
    ],
)
def test_a_device_without_fp8_is_refused_before_anything_starts(make, monkeypatch, engine, kind, capability, least):
    requirements._float8_device_reason.cache_clear()
    device = hardware.Gpu("a GPU", "uuid", capability=capability)
    monkeypatch.setattr(hardware, "gpus", lambda: hardware.Gpus("driver", (device,)))
    config = make(**MEGATRON | {"engine": engine, "model": "qwen3_4b", "workload__linear_dtype": kind})
    reason = requirements.unsupported_reason(config)
    requirements._float8_device_reason.cache_clear()
    assert reason is None if least is None else f"compute capability {least} and above, not on a GPU" in str(reason)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective", "selective_mlp"])
def test_the_flops_of_a_step_are_split_by_dtype_and_the_head_is_not_in_fp8(make, checkpointing):
    by_row, by_tensor = (
        make(workload__linear_dtype=kind, workload__activation_checkpointing=checkpointing) for kind in KINDS
    )
    found = matmul_flops_by_dtype(by_row, 256)
    model = by_row.model
    assert found["bfloat16"] == 6 * 256 * model.vocab_size * model.hidden_size
    assert sum(found.values()) == matmul_flops(by_row, 256)
    other = matmul_flops_by_dtype(by_tensor, 256)
    assert other["float8_e4m3fn"] + other["float8_e4m3fn+float8_e5m2"] == found["float8_e4m3fn"]
    again = matmul_flops(by_row, 256) - matmul_flops(make(workload__linear_dtype="model"), 256)
    assert (again > 0) == (checkpointing != "none")


def test_matrices_with_one_scale_are_gathered_in_half_the_bytes(make):
    """Norms stay in bf16, embedding and head too; gradients are reduced in fp32."""
    bf16, by_row, by_tensor = (
        sharding_traffic(make(workload__linear_dtype=kind, sp_size=2, method="ulysses")) for kind in ("model", *KINDS)
    )
    assert bf16 == by_row
    gathered = ("parameters", "all_gather")
    model = make().model
    outside = 2 * model.vocab_size * model.hidden_size + model.hidden_size
    norms = model.num_layers * (2 * model.hidden_size + 2 * model.head_dim)
    matrices = num_parameters(model) - outside - norms
    assert bf16[gathered] - by_tensor[gathered] == 2 * matrices / 2  # twice, of the other rank's half
    assert {key: size for key, size in bf16.items() if key != gathered} == {
        key: size for key, size in by_tensor.items() if key != gathered
    }


@pytest.mark.parametrize("kind", RECIPES)
def test_rounding_to_fp8_is_relative_to_the_largest_element_of_its_scale(kind):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)[:, None]
    found, recipe = rounded(x, RECIPES[kind], 1), RECIPES[kind]
    error = ((found - x).abs() / x.abs()).median(dim=1).values
    assert error[-1] < 2**-4  # e4m3 has three digits after the first
    assert (error[0] < 2**-4) == (
        kind != "float8_tensorwise"
    )  # with one scale the smallest rows are rounded to nothing
    assert torch.equal(rounded(found, recipe, 1), found)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_block_of_a_weight_is_128_x_128_and_that_of_an_input_128_along_the_sum(axis):
    """One large element makes the small ones of its block nothing, and changes no other."""
    x = torch.full((256, 256), 1e-6)
    x[3, 200] = 1e3
    lost = {is_weight: rounded(x, RECIPES["float8_blockwise"], axis, is_weight=is_weight) == 0 for is_weight in (0, 1)}
    of_weight, of_input = torch.zeros(2, 256, 256, dtype=torch.bool)
    of_weight[:128, 128:] = True
    of_input[(slice(0, 128), 200) if axis == 0 else (3, slice(128, 256))] = True
    of_weight[3, 200] = of_input[3, 200] = False
    assert torch.equal(lost[0], of_input)
    assert torch.equal(lost[1], of_weight)


def test_a_rank_quantises_its_own_tokens(make):
    """The largest element of one half changes nothing of the other's."""
    x, w = (torch.randn(size, generator=torch.Generator().manual_seed(0)) for size in ((256, 48), (32, 48)))
    two = product(make(workload__linear_dtype=KINDS[1], sp_size=2, method="ulysses"), torch.bfloat16, 256)
    one = product(make(workload__linear_dtype=KINDS[1], sp_size=1, method="single"), torch.bfloat16, 256)
    larger = x.clone()
    larger[200] *= 30
    assert torch.equal(two(x, w, None)[:128], two(larger, w, None)[:128])
    assert not torch.equal(one(x, w, None)[:128], one(larger, w, None)[:128])
