"""What trials are called: alike where they are, told apart by their options where they are not."""

import pytest

from sp_bench.driver.progress import apart, label
from sp_bench.planning.plan import Trial, plan
from sp_bench.rows.names import tell_apart


@pytest.fixture
def trials(make_config):
    def planned(*changes, replicates=1) -> list[Trial]:
        return plan([make_config(**each) for each in changes], replicates, 0, None)

    return planned


def test_options_that_the_label_does_not_say_are_named_where_cells_differ_in_them(trials):
    made = trials({}, {"hardware__device_memory_gib": 80.0}, {"workload__timed_steps": 99}, {"seq_len": 4096})
    options = apart(made)
    assert len({label(trial, options) for trial in made}) == 4
    by_length = {(t.config.seq_len, t.config.workload.timed_steps): options[t.cell_id] for t in made}
    assert by_length[2048, 99] == [("workload.timed_steps", 99)]
    assert by_length[4096, 10] == [], "its length tells it apart"
    (capped,) = (t for t in made if t.config.hardware.device_memory_gib)
    assert options[capped.cell_id] == [("workload.timed_steps", 10), ("hardware.device_memory_gib", 80.0)]
    assert label(capped, options).endswith("workload.timed_steps=10 hardware.device_memory_gib=80.0")
    assert any(label(t, options).endswith("hardware.device_memory_gib=null") for t in made)


def test_replicates_of_a_cell_differ_in_their_number_alone(trials):
    made = trials({}, replicates=3)
    options = apart(made)
    names = [label(trial, options) for trial in made]
    assert set(map(tuple, options.values())) == {()}
    assert names == [names[0], f"{names[0]} replicate 1", f"{names[0]} replicate 2"]


def test_what_has_one_name_is_called_the_same_in_all_places():
    values = [{"x": 1}, {"x": 2}, {"x": 1}, {"x": 3}]
    told = tell_apart(["a", "a", "a", "b"], values, ["x"], within=["here", "here", "there", "there"])
    assert told == [[("x", 1)], [("x", 2)], [("x", 1)], []]
    assert tell_apart(["a", "a"], values[:2], ["x"], within=["here", "there"]) == [[], []]


def test_options_are_said_until_nothing_is_left_to_tell():
    values = [{"x": 1, "y": 1}, {"x": 2, "y": 1}, {"x": 2, "y": 2}]
    told = tell_apart(["a"] * 3, values, ["x", "y"])
    assert told == [[("x", 1)], [("x", 2), ("y", 1)], [("x", 2), ("y", 2)]]
