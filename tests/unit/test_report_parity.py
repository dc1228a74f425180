"""The page's section on training parity."""

import pytest

from sp_bench.report.page import parity
from sp_bench.report.page.parts import plain

from .rows import cells_of, row

TRAINED = {"workload": "parity", "pass_kind": "step", "num_layers": 2, "sp_size": 4, "model": "tiny"}


def texts(rows) -> list[tuple[str, ...]]:
    section = parity.section(cells_of(rows))
    assert section is not None
    return [tuple(plain((text,)) for text in line.texts) for table in section.tables for line in table.lines]


def differences(mean: float) -> dict[str, float]:
    return {
        "mean_nll_difference": mean,
        "max_nll_difference": 3 * mean,
        "max_grad_norm_difference": 10 * mean,
    }


def test_each_training_has_a_line_with_its_engine_and_the_largest_of_its_replicates():
    rows = [
        row(**TRAINED, **differences(1e-7), replicate=0),
        row(**TRAINED, **differences(2e-7), replicate=1),
        row(**TRAINED, **differences(4e-7), engine="trl_sft", method="deepspeed_ulysses_hf"),
    ]
    first, second = texts(rows)
    assert (first[0], second[0]) == ("fsdp2", "trl_sft")
    assert first[-3:] == ("2.00e-07", "6.00e-07", "2.00e-06")
    assert second[-3:] == ("4.00e-07", "1.20e-06", "4.00e-06")


@pytest.mark.parametrize("changes", [{}, TRAINED | {"status": "incorrect"}])
def test_no_section_without_a_training_that_ran(changes):
    assert parity.section(cells_of([row(**changes)])) is None
