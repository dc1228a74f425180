"""What trials are called: alike where they are, told apart by their options where they are not."""

import pytest

from sp_bench.driver.labels import distinguishing, label
from sp_bench.driver.plan import Trial, plan


@pytest.fixture
def trials(make_config):
    def planned(*changes, replicates=1) -> list[Trial]:
        return plan([make_config(**each) for each in changes], replicates, 0, None)

    return planned


def test_options_that_the_label_does_not_say_are_named_where_cells_differ_in_them(trials):
    made = trials({}, {"hardware__device_memory_gib": 80.0}, {"workload__timed_steps": 99}, {"seq_len": 4096})
    options = distinguishing(made)
    assert len({label(trial, options) for trial in made}) == 4
    names = {trial.config.hardware.device_memory_gib: options.get(trial.cell_id) for trial in made}
    assert set(names) == {None, 80.0}
    assert names[80.0] is not None
    assert names[80.0].startswith("hardware.device_memory_gib=80.0 workload.timed_steps=")
    assert any(text.startswith("hardware.device_memory_gib=null ") for text in options.values())
    (long,) = (trial for trial in made if trial.config.seq_len == 4096)
    assert long.cell_id not in options, "its length tells it apart"


def test_replicates_of_a_cell_differ_in_their_number_alone(trials):
    made = trials({}, replicates=3)
    options = distinguishing(made)
    names = [label(trial, options) for trial in made]
    assert options == {}
    assert names == [names[0], f"{names[0]} replicate 1", f"{names[0]} replicate 2"]
