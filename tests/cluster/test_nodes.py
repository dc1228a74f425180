"""Trials over both nodes of a real Slurm: proven, counted and reported as on one, and ended on both."""

import pytest

from sp_bench.rows import store

from .test_slurm import DEADLINES, SMALL, jobs, logs
from .test_slurm import sp_bench as sp_bench

BOTH = ("num_nodes=2", "campaign=two", *DEADLINES)


SWEEP = """\
# @package _global_
sweep:
  blocks:
    - method: [ulysses, ring]
    - method: usp
      method.ulysses_degree: 2
      method.placement: [ulysses_inner, ring_inner]
"""


def read(folder):
    return store.read(folder)[0].to_pylist()


def test_trials_over_two_nodes_are_one_job_whose_rows_are_proven_counted_and_name_both(sp_bench, tmp_path):
    """Ulysses inside each node with the ring across, and the reverse, beside both alone."""
    sweep = tmp_path / "conf" / "sweep"
    sweep.mkdir()
    (sweep / "both.yaml").write_text(SWEEP)
    words = ("sweep=both", "sp_size=4", "seq_len=96", "model.num_heads=4", "model.num_kv_heads=4", *BOTH, *SMALL)
    folder = tmp_path / "results" / "two"
    done = sp_bench("submit", *words, "--cluster", "two", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr + logs(folder)
    assert "4 trials of replicate 0 on 2 nodes" in done.stdout
    assert len(jobs(done.stdout)) == 1
    for row in read(folder):
        assert (row["status"], row["num_nodes"], row["ranks_per_node"]) == ("ok", 2, 2), row["reason"]
        assert row["comm_counted_bytes"] == row["comm_predicted_bytes"] > 0
        assert row["internode_counted_bytes"] == row["internode_predicted_bytes"]
        assert len(row["node_environments"]) == 2
        assert "unequal_nodes" not in row["flags"]
    sent = {(row["method"], row["placement"]): row["internode_counted_bytes"] for row in read(folder)}
    all_bytes = {(row["method"], row["placement"]): row["comm_counted_bytes"] for row in read(folder)}
    assert sent["ulysses", None] == pytest.approx([all_bytes["ulysses", None] * 2 / 3] * 4)  # 2 of 3 peers
    assert sent["ring", None] == [0, all_bytes["ring", None], 0, all_bytes["ring", None]]  # every second hop
    exchanged = all_bytes["usp", "ulysses_inner"] - sent["usp", "ulysses_inner"][0]
    assert sent["usp", "ring_inner"] == [exchanged] * 4  # what the other placement keeps inside
    assert sp_bench("report", "results/two").returncode == 0
