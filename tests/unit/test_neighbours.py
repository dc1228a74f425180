"""When a row is flagged because others worked on its machine."""

import pytest

from sp_bench.driver.neighbours import FLAG, Look, Neighbours, _others, foreign

BEFORE = Look(busy_s=100.0, own_s=40.0, possible_s=1000.0, processes=0)


@pytest.mark.parametrize(
    ("busy_s", "own_s", "flagged"),
    [
        (110.0, 50.0, False),  # all of it ours
        (110.9, 50.0, False),
        (111.1, 50.0, True),  # over a tenth of what 1 processor could do in 10 s
        (102.0, 40.5, True),
        (100.5, 41.5, False),  # clocks tick at other moments
    ],
)
def test_processors_that_others_used_for_over_a_tenth_of_the_window_are_foreign_load(busy_s, own_s, flagged):
    assert foreign(BEFORE, Look(busy_s, own_s, possible_s=1010.0, processes=0)) == flagged


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1)])
def test_a_process_of_others_on_a_gpu_at_either_look_is_foreign_load(before, after):
    looks = [BEFORE._replace(processes=num) for num in (before, after)]
    assert foreign(*looks)


def test_no_time_between_the_looks_tells_nothing():
    assert not foreign(BEFORE, BEFORE)


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        (set(), 0),
        ({7}, 0),  # our rank
        ({7, 900}, 1),
        ({4007}, 0),  # our rank, as the driver numbers it outside of a container
        ({4007, 4900}, 1),
    ],
)
def test_our_own_rank_on_a_gpu_does_not_count(pids, others):
    assert _others(pids, {5, 7}) == others


def test_a_trial_that_ended_before_its_window_has_no_flag(make_config):
    neighbours = Neighbours(make_config())
    neighbours.on_phase("correctness")
    assert neighbours.flags() == []
    assert FLAG == "foreign_load"
