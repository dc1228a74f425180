"""DeepSpeed's UlyssesSPAttentionHF on real ranks: output, gradients, bytes, and what stays in the process."""

import itertools
from fractions import Fraction

import pytest
from oracle import Case, mesh_of, relative_errors
from ranks import run, worlds
from test_gate import trial
from test_ledger import check, counted
from test_libraries import needs
from test_train_step import RECOMPUTED, check_counted_bytes
from trials import row
from trials import trial as training_trial

from sp_bench import methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.costs import attention as attention_costs

METHOD = MethodConfig("deepspeed_ulysses_hf")
OURS = MethodConfig("ulysses")


def cases(sp_size: int) -> list[Case]:
    """MHA, GQA and MQA. With MQA every rank gets a copy of the one KV head."""
    return [
        Case(METHOD, AttentionShape(batch, 12 * sp_size, 12, hkv, 8, causal, "float64"))
        for hkv, causal, batch in itertools.product((12, 4, 2, 1), (True, False), (1, 2))
        if attention_costs.head_split_reason(AttentionShape(1, 1, 12, hkv, 8, causal, "float64"), sp_size, "", "")
        is None
    ]


def check_cases(rank: int, sp_size: int) -> None:
    mesh = mesh_of(methods.get(METHOD.name).layout(METHOD, sp_size))
    for case in cases(sp_size):
        errors = relative_errors(case, mesh)
        assert max(errors.values()) < 1e-13, f"{case} on rank {rank}: {errors}"
        check(case, mesh)
        sent, ours = counted(case, mesh), counted(Case(OURS, case.shape), mesh)
        positions = Fraction(8 * case.shape.batch_size * 12 * (sp_size - 1))
        assert sent == ours | ({("forward", "all_gather"): positions} if positions else {}), str(case)


@needs("deepspeed")
@needs("transformers")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(gloo=(1, 2, 3, 4), nccl=(1, 2, 4)))
def test_it_agrees_with_the_oracle_and_sends_the_bytes_of_ulysses_and_the_positions(backend: str, sp_size: int) -> None:
    assert len(cases(sp_size)) >= 8
    run(sp_size, check_cases, sp_size, backend=backend)


def check_refusals(rank: int) -> None:
    """The library itself refuses the heads that our `unsupported_reason` refuses."""
    mesh = mesh_of(methods.get(METHOD.name).layout(METHOD, 4))
    for hq, hkv in ((6, 6), (12, 3)):
        shape = AttentionShape(1, 48, hq, hkv, 8, True, "float64")
        assert attention_costs.head_split_reason(shape, 4, "sp_size", METHOD.name) is not None
        with pytest.raises(ValueError, match="not divisible by SP size 4"):
            counted(Case(METHOD, shape), mesh)


@needs("deepspeed")
@needs("transformers")
def test_the_library_refuses_the_heads_that_our_reason_refuses() -> None:
    run(4, check_refusals)


def check_training(rank: int) -> None:
    check_counted_bytes(training_trial(METHOD, 2, seq_len=45, batch_size=2, workload=RECOMPUTED))


@needs("deepspeed")
@needs("transformers")
def test_a_training_step_is_right_and_its_exchanges_are_not_counted_as_parameters() -> None:
    run(2, check_training)


def check_no_trace(rank: int) -> None:
    columns = row(trial(METHOD, 2))
    assert columns["rel_error_dq"] < 1e-6
    assert columns["comm_counted_bytes"] == columns["comm_predicted_bytes"] > 0
    from deepspeed.comm import comm  # pyright: ignore[reportMissingImports]
    from deepspeed.sequence import layer  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

    assert comm.cdb is None
    assert groups.mpu is None
    assert layer._all_to_all_groups == {}
    assert row(trial(OURS, 2))["rel_error_dq"] < 1e-6
    assert row(trial(MethodConfig("deepspeed_ulysses"), 2))["rel_error_dq"] < 1e-6


@needs("deepspeed")
@needs("transformers")
def test_a_trial_passes_the_gate_and_so_do_the_next_ones_in_its_processes() -> None:
    run(2, check_no_trace)
