"""Edit one method in a copy of the checkout: what a second run does, and what its rows are compared with."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from sp_bench.analysis.cells import cells
from sp_bench.analysis.ratios import shared_replicates
from sp_bench.analysis.selection import select

ROOT = Path(__file__).parents[2]
SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2", "kernel=math")
ARGUMENTS = ("method=ring,ulysses", "sp_size=1", "seq_len=96", "campaign=small", "isolation=group", *SMALL)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sp_bench", *arguments]


def environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout)}


def sp_bench(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(command(*arguments), cwd=checkout, env=environment(checkout), capture_output=True, text=True)
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
    again = ("run", "method=ring", "sp_size=1", "seq_len=96,98", "campaign=again", *SMALL, "--no-report")
    process = subprocess.Popen(
        command(*again), cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    )
    while not list((tmp_path / "results" / "again").glob("*.parquet")):
        assert process.poll() is None
        time.sleep(0.02)
    method.write_text(f"{method.read_text()}\nADDED = 2\n")  # while it runs the other trial
    said = process.communicate()[1]
    assert process.returncode == 2
    assert "(ring) was edited while this run went on, so it has no row" in said.splitlines()[-1]
    assert len(list((tmp_path / "results" / "again").glob("*.parquet"))) == 1
