"""Cells of one real rank beside those of all ranks."""

import json
from datetime import timedelta

import pytest

from sp_bench.analysis.grades import code_changes
from sp_bench.analysis.held import OWN_RANK, groups, held, signs
from sp_bench.report import held_tables

from .pages import page_of
from .rows import cells_of, row

(CHANGED,) = [change.at for change in code_changes() if change.commit == "c1f674b"]
ANOTHER_SEED = json.dumps({"hardware": {"name": "cpu", "device": "cpu"}, "seed": 1})  # another cell of the same place
NEW, OLD = CHANGED + timedelta(days=1), CHANGED - timedelta(days=1)


def one(link: str = "nvlink", **columns):
    """A row of one real rank of 4; as it takes its link from its config, so does a real one."""
    config = {"hardware": {"name": "cpu", "device": "cpu"}, "seed": 0, "world": "one_rank", "link": {"name": link}}
    found = row(sp_size=4, config=json.dumps(config), **{"started_at": NEW, **columns})
    return found | {"evidence": "one_rank", "link": link}


def measured(**columns):
    return row(**{"sp_size": 4, "started_at": NEW, **columns})


def test_a_cell_is_held_against_the_newest_measured_cell_of_its_options_and_beside_messages_without_delay():
    rows = [
        one(median_ms=9.0),
        one(link="none", median_ms=8.0),
        measured(median_ms=10.0),
        measured(median_ms=20.0, sp_size=2),
        measured(median_ms=30.0, seq_len=2048),
        measured(median_ms=40.0, batch_size=2),
    ]
    (found,) = held(cells_of(rows))
    assert found.ratio == pytest.approx(0.9)
    assert found.ratio_without_delay == pytest.approx(0.8)
    assert found.scaled is None
    assert found.exposed_ms is None


ALL = {"peak_allocated_bytes": [100, 105, 105, 120]}


def test_a_peak_is_held_against_that_of_the_same_rank():
    (found,) = held(cells_of([one(peak_allocated_bytes=[100]), measured(**ALL)]))
    assert found.peak == 1
    (found,) = held(
        cells_of([one(peak_allocated_bytes=[90], leftover_bytes=[0]), measured(**ALL, leftover_bytes=[10] * 4)])
    )
    assert found.peak == 1
    (of_last,) = held(cells_of([one(peak_allocated_bytes=[120], ran_rank=3), measured(**ALL)]))
    assert of_last.peak == 1
    (of_no_peak,) = held(cells_of([one(), measured(**ALL)]))
    assert of_no_peak.peak is None


def test_a_peak_of_an_old_row_beside_its_own_ranks_is_left_out_since_nobody_knows_which_rank_it_is_of():
    same = {"environment": {"device_names": ["A"], "device_uuids": ["a"]}}
    for at, peak in ((OWN_RANK - timedelta(hours=1), None), (OWN_RANK, 1)):
        ran = {"started_at": at} | same
        (found,) = held(cells_of([one(peak_allocated_bytes=[100], **ran), measured(**ALL | ran)]))
        assert found.is_of_one_machine
        assert found.peak == peak


def test_a_slow_machine_is_scaled_away_by_the_step_without_messages():
    rows = [
        one(median_ms=9.0, compute_only_step_ms=[8.0], exposed_comm_ms=1.0),
        measured(median_ms=11.0, compute_only_step_ms=[10.0], exposed_comm_ms=1.0),
    ]
    (found,) = held(cells_of(rows))
    assert found.scaled == pytest.approx(9 / 11 * 10 / 8)
    assert found.exposed_ms == (1.0, 1.0)
    assert found.exposed_is_near
    newer = {"started_at": NEW + timedelta(hours=1), "config": ANOTHER_SEED}
    (found,) = held(cells_of([*rows, measured(median_ms=9.5, **newer)]))
    assert found.ratio == pytest.approx(9 / 9.5)
    assert found.scaled == pytest.approx(9 / 11 * 10 / 8)


def test_a_cell_on_the_same_devices_comes_before_a_newer_one_on_others_and_needs_no_scale():
    def on(uuid):
        return {"device_names": ["A"], "device_uuids": [uuid]}

    rows = [
        one(median_ms=9.0, environment=on("GPU-1")),
        measured(median_ms=10.0, environment=on("GPU-1")),
        measured(median_ms=30.0, environment=on("GPU-2"), started_at=NEW + timedelta(days=1), config=ANOTHER_SEED),
    ]
    (found,) = held(cells_of(rows))
    assert found.is_of_one_machine
    assert found.scaled == found.ratio == pytest.approx(0.9)
    (found,) = held(cells_of([rows[0], rows[2]]))
    assert not found.is_of_one_machine
    assert found.scaled is None


def test_clocks_and_power_of_both_stand_beside_each_other():
    def state(mhz, watts):
        return {
            "sm_clock_mhz": mhz,
            "memory_clock_mhz": None,
            "power_w": watts,
            "temperature_c": None,
            "throttle_reasons": None,
        }

    rows = [
        one(device_state=[state(1600, 690.0)]),
        measured(device_state=[state(1500, 700.0), None, state(1400, 680.0)]),
    ]
    (found,) = held(cells_of(rows))
    assert found.device("sm_clock_mhz") == (1600, 1450)
    assert "| 690 / 690 |" in held_tables.markdown(cells_of(rows))
    (unknown,) = held(cells_of([one(device_state=[None]), measured()]))
    assert unknown.device("power_w") is None


@pytest.mark.parametrize(("started_at", "method", "like"), [(OLD, "ring", 0), (NEW, "ring", 1), (OLD, "ulysses", 1)])
def test_a_median_is_of_like_code(started_at, method, like):
    ring = {"method": method, "ring_degree": 4 if method == "ring" else 1}
    cells = cells_of([one(**ring), measured(started_at=started_at, **ring)])
    (group,) = groups(held(cells))
    assert len(group.helds) == 1
    assert len(group.of_like_code) == like
    assert ("older" in held_tables.markdown(cells).splitlines()[-1]) == (not like)


def test_a_sign_is_asked_for_where_the_measured_methods_differ_by_3_percent():
    def both(ring_ms, ulysses_ms, make, **columns):
        split = {"method": "ulysses", "ring_degree": 1, "ulysses_degree": 4}
        return [make(median_ms=ring_ms, **columns), make(median_ms=ulysses_ms, **split, **columns)]

    rows = [*both(9.0, 10.0, one), *both(9.5, 10.0, measured)]
    rows += [*both(9.0, 10.0, one, seq_len=2048), *both(10.5, 10.0, measured, seq_len=2048)]
    rows += [*both(9.0, 10.0, one, seq_len=4096), *both(10.1, 10.0, measured, seq_len=4096)]
    cells = cells_of(rows)
    found = {of.held.one.asked["seq_len"]: of for of in signs(held(cells), cells)}
    assert {n: (of.counts, of.is_right) for n, of in found.items()} == {
        1024: (True, True),
        2048: (True, False),
        4096: (False, False),
    }
    assert "On 4 GPUs it is right in 1 of 2 places, of like code in 1 of 2." in held_tables.markdown(cells)


def test_a_page_has_the_tables_where_both_kinds_are_on_it():
    assert "One real rank beside all ranks" in page_of([one(), measured()]).text
    assert "One real rank beside all ranks" not in page_of([one()]).text
    assert "One real rank beside all ranks" not in page_of([measured()]).text


@pytest.mark.parametrize(("beyond", "right"), [("oom", "yes"), ("ok", "no")])
def test_one_rank_is_asked_for_both_ends_of_a_bracket(beyond, right):
    rows = [measured(seq_len=2048), measured(seq_len=4096, status="oom"), one(seq_len=2048)]
    assert "The edge of memory" not in held_tables.markdown(cells_of(rows))
    text = held_tables.markdown(cells_of([*rows, one(seq_len=4096, status=beyond)]))
    (line,) = [line for line in text.splitlines() if line.endswith(f"| {right} |")]
    assert "| 2,048 | fits | 4,096 |" in line


def test_the_map_has_whole_steps_and_marks_what_waits_for_the_host():
    traced = {"kernel_ms": [{"attention": 5.0, "matmul": 1.0, "other": 0.5, "messages": 2.0, "exposed_messages": 1.25}]}
    cells = cells_of([
        one(median_ms=9.0, flags=["host_bound"]),
        one(median_ms=8.0, seq_len=2048, **traced),
        one(median_ms=7.0, seq_len=4096, num_layers=1),
    ])  # fmt: skip
    rule, *lines = held_tables.map_markdown(cells).splitlines()[-3:]
    assert rule == "|---|--:|--:|--:|---|---|--:|--:|--:|--:|---|", "numbers to the right"
    assert [line.split(" | ")[1] for line in lines] == ["1,024", "2,048"]
    assert [line.endswith("| waits |") for line in lines] == [True, False]
    assert "| 1.2 |" in lines[1]
