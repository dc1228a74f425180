"""What a step is made of: kernels by class, and its phases."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.measure import step_parts
from sp_bench.measure.ledger import Ledger, phase
from sp_bench.measure.step_parts import KERNEL_PARTS, PARTS, Kernel, PhaseTimes, by_class
from sp_bench.rows.schema import SCHEMA

MS = 10**6
ATTENTION = "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object"
NAMES = {
    ATTENTION: "attention",
    "void cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
    "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "messages",
    "Memcpy PtoP (Device -> Device)": "messages",
    "Memcpy DtoD (Device -> Device)": "other",
    "Memcpy DtoH (Device -> Pinned)": "host_copies",
    "triton_poi_fused_mul_silu_0": "other",
}


@pytest.mark.parametrize(("name", "of"), NAMES.items())
def test_a_kernel_is_of_the_class_that_its_name_says(name: str, of: str) -> None:
    found = by_class([Kernel(name, 0, 3 * MS)])
    exposed = {f"exposed_{of}": 3.0} if of in ("messages", "host_copies") else {}
    assert {part: ms for part, ms in found.items() if ms} == {of: 3.0} | exposed


def test_messages_and_copies_are_exposed_where_nothing_else_runs() -> None:
    kernels = [
        Kernel(ATTENTION, 0, 10 * MS),
        Kernel("nccl_1", 5 * MS, 14 * MS),  # 4 of 9 ms alone
        Kernel("nccl_2", 13 * MS, 15 * MS),  # one more
        Kernel("triton_poi", 18 * MS, 20 * MS),
        Kernel("Memcpy HtoD (Pinned -> Device)", 12 * MS, 16 * MS),  # 1 of 4 ms alone
    ]
    found = {"messages": 11.0, "host_copies": 4.0, "attention": 10.0, "matmul": 0.0, "other": 2.0}
    assert by_class(kernels) == found | {"exposed_messages": 5.0, "exposed_host_copies": 1.0, "idle": 2.0}


@given(st.lists(st.tuples(st.sampled_from(list(NAMES)), st.integers(0, 50), st.integers(1, 20)), min_size=1))
def test_what_runs_what_waits_and_what_is_exposed_fill_the_step(drawn: list[tuple[str, int, int]]) -> None:
    kernels = [Kernel(name, start * MS, (start + length) * MS) for name, start, length in drawn]
    found, step = by_class(kernels), max(k.end_ns for k in kernels) - min(k.start_ns for k in kernels)
    assert set(found) == set(KERNEL_PARTS)
    computing = sum(found[name] for name in ("attention", "matmul", "other"))
    beside = found["exposed_messages"] + found["exposed_host_copies"] + found["idle"]
    assert beside <= step / MS <= computing + beside
    assert 0 <= found["exposed_messages"] <= found["messages"]
    assert 0 <= found["exposed_host_copies"] <= found["host_copies"]


def test_the_schema_has_the_same_parts() -> None:
    assert {field.name for field in SCHEMA.field("kernel_ms").type.value_type} == set(KERNEL_PARTS)
    assert [field.name for field in SCHEMA.field("part_ms").type.value_type] == list(PARTS)


def test_the_phases_of_a_step_add_up_and_a_second_run_is_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.020, 0.030, 0.060, 0.070, 0.070, 0.071, 0.071, 0.111, 0.120])
    monkeypatch.setattr(step_parts.time, "perf_counter", lambda: next(clock))
    with Ledger() as book:
        with phase("backward"), phase("recompute"):
            pass
        with phase("other"):
            pass
        with phase("optimizer"):
            pass
    found = book.phase_times.ms()
    assert found == pytest.approx({"forward": 29, "recompute": 30, "backward": 20, "optimizer": 41})


def test_a_step_that_does_not_say_where_its_backward_is_has_no_phases() -> None:
    times = PhaseTimes(torch.device("cpu"))
    with times.inside("step"):
        pass
    assert times.ms() is None
