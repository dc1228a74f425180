"""Edit one method in a copy of the checkout: what a second run does, and what its rows are compared with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from sp_bench.report.cells import cells
from sp_bench.report.ratios import shared_replicates
from sp_bench.report.selection import select

ROOT = Path(__file__).parents[2]
SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2", "kernel=math")
ARGUMENTS = ("method=ring,ulysses", "sp_size=1", "seq_len=96", "campaign=small", *SMALL)


def sp_bench(checkout: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "sp_bench", *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_edited_method_alone_runs_again_and_pairs_with_the_others_rows(tmp_path: Path) -> None:
    for folder in ("sp_bench", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    results = tmp_path / "results" / "small"
    sp_bench(tmp_path, "run", *ARGUMENTS, "--no-report")
    before = {path.name for path in results.glob("*.parquet")}
    method = tmp_path / "sp_bench" / "methods" / "ring.py"
    method.write_text(f"# A comment changes nothing.\n{method.read_text()}")
    assert "2 trials: 2 done" in sp_bench(tmp_path, "plan", *ARGUMENTS)
    method.write_text(f"{method.read_text()}\nADDED = 1\n")
    said = sp_bench(tmp_path, "run", *ARGUMENTS, "--no-report")
    assert "1 trial of 1 to run had been measured before" in said
    assert "1 of 2 trials are committed already" in said
    assert len({path.name for path in results.glob("*.parquet")} - before) == 1
    selection = select([results])
    ring, ulysses = sorted(cells(selection.rows), key=lambda cell: str(cell.asked["method"]))
    assert (ring.asked["method"], ulysses.asked["method"]) == ("ring", "ulysses")
    assert ring.rows[0]["started_at"] > ulysses.rows[0]["started_at"]
    assert ring.setting == ulysses.setting
    assert len(shared_replicates(ring, ulysses)) == 1
    assert selection.left_out == {selection.core_id: 1}
