"""What the appendix says was checked of training steps."""

import pytest

from sp_bench.formats import MISSING
from sp_bench.report.page.appendix import stages, training

from .rows import cells_of, row

STAGES = ((128, 2), (256, 4), (512, 1))  # tokens and steps
STEP = {"workload": "train_step", "pass_kind": "step", "num_layers": 2, "sp_size": 2, "model": "tiny"}


def lines(rows) -> list[tuple[str, ...]]:
    table = training(cells_of(rows))
    return list(map(table.texts, table.lines))


def proven(error: float, parameter: str, roundings: float) -> dict[str, object]:
    return {
        "grad_error": {"parameter": parameter, "error": error, "budget": 0.05},
        "update_error": {"parameter": "norm.weight", "error": roundings, "budget": 4.0},
    }


def test_the_worst_of_all_rows_of_an_engine_and_method_is_shown():
    fp32 = {"fp32_proof": "step_only", "fp32_grad_error": {"parameter": "a", "error": 2e-6, "budget": 3e-5}}
    rows = [
        row(**STEP, dtype="bfloat16", **proven(0.01, "a", 1.5), **fp32, batch_loading="before", seq_len=4096),
        row(**STEP, dtype="bfloat16", **proven(0.02, "b", 1.0), **fp32, batch_loading="before", seq_len=8192),
    ]
    ((engine, _, _, dtype, loaded, worst, parameter, also, there, update),) = lines(rows)
    assert (engine, dtype, loaded) == ("fsdp2", "bfloat16", "before the first step")
    assert (float(worst), parameter, also) == (0.02, "b", "step only")
    assert (float(there), float(update)) == (2e-6, 1.5)


def test_rows_from_before_say_that_nothing_was_compared():
    ((*_, loaded, worst, parameter, also, there, update),) = lines([row(**STEP)])
    assert loaded == "not recorded"
    assert {worst, parameter, also, there, update} == {MISSING}


@pytest.mark.parametrize("changes", [{}, STEP | {"status": "incorrect"}])
def test_no_section_without_a_training_step_that_ran(changes):
    assert lines([row(**changes)]) == []


def test_a_stage_exposes_what_its_steps_but_the_first_take_over_those_without_messages():
    ends = [{"seq_len": n, "num_steps": k, "compiled": 0, "compile_s": 0.0, "reserved_bytes": None} for n, k in STAGES]
    times = [{"first_step_ms": 10.0, "median_step_ms": 2.0}, {"first_step_ms": 8.0, "median_step_ms": 4.5}]
    times.append({"first_step_ms": 9.0, "median_step_ms": None})
    alone = [9.0, 1.5, 7.0, 4.0, 3.0, 9.0, 1.0]
    stream = {"workload": "stream", "pass_kind": "step", "step_ms": [5.0] * 7, "stage_ends": ends, "stage_times": times}
    timed, plain = (
        stages(cells_of([row(**stream, compute_only_step_ms=each, method=method)]))
        for method, each in (("ring", alone), ("ulysses", None))
    )
    assert [stage.exposed_ms for stage in timed.lines] == [0.5, 0.5, None]
    assert [stage.exposed_ms for stage in plain.lines] == [None] * 3
