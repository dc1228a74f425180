"""Grades: what they follow from, and what they keep from being bold."""

from datetime import timedelta
from typing import Any

import pytest

from sp_bench.analysis.cells import narrowed
from sp_bench.analysis.grades import DOUBTS, code_changes
from sp_bench.analysis.metrics import mj_per_token
from sp_bench.analysis.settings import Difference, settings
from sp_bench.analysis.words import FLAGS
from sp_bench.report.cards import card, compared

from .pages import page_of
from .rows import cells_of
from .test_report import ULYSSES, replicated


def difference(ulysses: list[dict[str, Any]], ring: list[dict[str, Any]]) -> Difference:
    over, under = cells_of([*ulysses, *ring])
    return Difference(under, over)


def both(number: int, **columns: Any) -> Difference:
    ones = [1.0] * number
    return difference(replicated(10.0, ones, **ULYSSES), replicated(11.0, ones, **columns))


@pytest.mark.parametrize(("number", "mark"), [(1, "C"), (2, "B"), (5, "B"), (6, "A")])
def test_a_grade_follows_from_the_number_of_pairs(number, mark) -> None:
    assert both(number).grade.mark == mark
    assert both(number).is_proven == (mark == "A")


@pytest.mark.parametrize(
    ("number", "flagged", "mark", "why"),
    [
        (6, 1, "B", "1 of 6 flagged transient, 6 replicates"),
        (6, 2, "B", "2 of 6 flagged transient, 6 replicates"),
        (6, 3, "C", "3 of 6 flagged transient, 6 replicates"),
        (3, 1, "B", "1 of 3 flagged transient, 3 replicates"),
        (2, 1, "C", "1 of 2 flagged transient, 2 replicates"),
        (6, 6, "C", "flagged transient, 6 replicates"),
        (1, 1, "C", "flagged transient, 1 replicate"),
    ],
)
def test_a_flag_doubts_its_own_pair_and_half_of_the_pairs_make_a_ratio_weak(number, flagged, mark, why) -> None:
    """No number leaves a doubtful pair out, and none with one is bold."""
    ring = replicated(11.0, [1.0] * number)
    for each in ring[:flagged]:
        each["flags"] = ["transient"]
    found = difference(replicated(10.0, [1.0] * number, **ULYSSES), ring)
    assert (found.grade.mark, found.grade.why) == (mark, why)
    assert len(found.keys) == number
    assert not found.is_proven
    assert found.grade.words == f"{mark}{'·once' if number == 1 else ''}·flagged"


def test_a_flag_of_memory_doubts_no_time() -> None:
    assert both(6, flags=["leftover_memory"]).grade.mark == "A"  # doubts memory, not times
    assert set(FLAGS) >= DOUBTS


def test_rows_age_by_a_change_that_concerns_them_and_by_no_other() -> None:
    (change,) = [each for each in code_changes() if each.commit == "c1f674b"]
    before = {"started_at": change.at - timedelta(hours=1)}
    aged = both(6, **before)
    assert (aged.grade.mark, aged.grade.why) == ("C", "code before c1f674b, 6 replicates")
    assert both(6, started_at=change.at).grade.mark == "A"
    exchange, chunks = (
        difference(
            replicated(10.0, [1.0] * 6, **before, **ULYSSES, **options),
            replicated(11.0, [1.0] * 6, method="upipe", **before),
        )
        for options in ({}, {"head_chunks": 4})
    )
    assert exchange.grade.mark == "A"
    assert chunks.grade.mark == "C"
    library = {"method": "ring", "implementation": "ring-flash-attn==0.1.8", "kernel": "cudnn"}
    assert both(6, **before, **library).grade.mark == "A"


def test_an_imitated_link_is_never_an_a_and_says_why() -> None:
    over = [replicated(ms, [1.0] * 6, fabric="channels_2", **of) for ms, of in ((10.0, ULYSSES), (11.0, {}))]
    found = difference(*over)
    assert (found.grade.words, found.grade.why) == ("B·imitated", "link imitated by 2 NCCL channels, 6 replicates")
    assert not found.is_proven


def test_weak_verdicts_are_grey_and_not_bold_and_every_verdict_shows_its_grade() -> None:
    for flags, weak in (([], False), (["transient"], True)):
        rows = [*replicated(10.0, [1.0] * 6, **ULYSSES), *replicated(11.0, [1.0] * 6, flags=flags)]
        page = page_of(rows).html
        assert ("<b>Ulysses is 1.10x" in page) != weak
        assert ('class="verdict weak"' in page) == weak
        assert (
            f'title="{"flagged transient, " if weak else ""}6 replicates">{"C·flagged" if weak else "A"}</span>' in page
        )


def test_two_methods_stand_side_by_side_by_the_replicates_that_pair_alone() -> None:
    ulysses = [*replicated(10.0, [1.0], **ULYSSES), *replicated(40.0, [1.0] * 3, **ULYSSES)[1:]]
    rows = [*ulysses, *replicated(12.5, [1.0])]
    (setting,) = settings(cells_of(rows))
    (place,) = setting.places
    assert compared(setting, place).startswith("51.2k against 41.0k tokens/s a GPU")
    found = next(cell for cell in setting.cells if cell.asked["method"] == "ulysses")
    assert found.median_step_ms == 40.0
    assert narrowed(found, list(found.step_ms)[:1]).median_step_ms == 10.0
    assert card(setting).numbers == compared(setting, place)


def test_energy_of_a_token_is_that_of_all_devices_in_each_replicate() -> None:
    rows = replicated(10.0, [1.0] * 3, **ULYSSES, energy_j=[4.0, 6.24])
    rows[2]["energy_j"] = None  # a window too short for NVML
    (ulysses,) = cells_of(rows)
    assert mj_per_token(ulysses) == pytest.approx(1e3 * 10.24 / 1024)
    assert "mJ/token" in page_of([*rows, *replicated(11.0, [1.0])]).text
