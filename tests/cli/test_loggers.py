"""Rows leave sp_bench: as they are committed, to loggers of experiments, and as flat CSV and JSON."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sp_bench.rows import store

from .console import console, refusal

ONE = ("method=single", "sp_size=1", "workload.warmup_steps=1", "workload.timed_steps=1", "--no-report")
TINY = (*ONE, "seq_len=64")
# stands where the package would: takes what the real one takes, and writes down what it is told
WANDB = """
import json, os
class Settings:
    def __init__(self, *, silent): pass
class Run:
    def log(self, numbers): tell("log", numbers)
    def finish(self, exit_code): tell("finish", exit_code)
def init(*, project, group, name, config, dir, reinit, settings):
    tell("init", [project, group, name, config])
    return Run()
def tell(*what):
    if os.environ.get("BROKEN"):
        raise ConnectionError("no network")
    with open(os.environ["TOLD"], "a") as file:
        print(json.dumps(what), file=file)
"""


def says(folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sp_bench", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture
def with_wandb(tmp_path) -> dict[str, str]:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "wandb.py").write_text(WANDB)
    paths = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": paths, "TOLD": str(tmp_path / "told.txt")}


def test_each_row_is_told_once_with_its_options_and_numbers(tmp_path, with_wandb):
    done = says(tmp_path, "run", *TINY, "campaign=night", "--log-to", "wandb", **with_wandb)
    assert done.returncode == 0, done.stderr
    (row,) = store.read(tmp_path / "results" / "night")[0].to_pylist()
    told = [json.loads(line) for line in Path(with_wandb["TOLD"]).read_text().splitlines()]
    (_, (project, group, name, options)), (_, numbers), (_, code) = told
    assert (project, group, code) == ("sp_bench", "night", 0)
    assert row["trial_id"] in name
    assert (options["seq_len"], options["method.name"], options["status"]) == (64, "single", "ok")
    assert numbers["median_step_ms"] == row["median_step_ms"]
    assert says(tmp_path, "run", *TINY, "campaign=night", "--log-to", "wandb", **with_wandb).returncode == 0
    assert len(Path(with_wandb["TOLD"]).read_text().splitlines()) == 3


def test_a_logger_that_fails_is_named_and_the_sweep_goes_on(tmp_path, with_wandb):
    words = ("run", *ONE, "seq_len=64,65", "isolation=group", "campaign=night", "--log-to", "wandb")
    done = says(tmp_path, *words, **with_wandb, BROKEN="yes")
    assert done.returncode == 0
    assert done.stdout.count("--log-to wandb failed and gets no further rows: no network") == 1
    assert len(store.read(tmp_path / "results" / "night")[0]) == 2


def test_tensorboard_gets_a_run_a_row(tmp_path):
    done = says(tmp_path, "run", *TINY, "campaign=night", "--log-to", "tensorboard")
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout.replace("0 failed", "")
    (row,) = store.committed(tmp_path / "results" / "night")
    place = tmp_path / "results" / "night" / store.WORK / "tensorboard"
    assert list(place.glob(f"*{row.trial_id}*/events.*"))


@pytest.mark.parametrize(
    ("name", "said"),
    [("nothing", "unknown; use one of wandb, mlflow, tensorboard"), ("mlflow", "pip install 'sp-bench[mlflow]'")],
)
def test_a_logger_that_is_not_there_is_refused_before_anything_runs(tmp_path, monkeypatch, capfd, name, said):
    monkeypatch.chdir(tmp_path)
    assert said in refusal(capfd, "run", *TINY, "--log-to", name)
    assert not (tmp_path / "results").exists()


def test_rows_are_exported_flat(tmp_path, monkeypatch, capfd):
    folder = Path("results/h200x2_step_options").resolve()
    monkeypatch.chdir(tmp_path)
    rows, campaign = store.read(folder)[0].to_pylist(), str(folder)
    table = list(csv.DictReader(io.StringIO(console(capfd, "export", campaign)[1])))
    assert [float(line["median_step_ms"]) for line in table] == [row["median_step_ms"] for row in rows]
    assert "rank_step_ms" not in table[0]
    assert console(capfd, "export", campaign, "--format", "json", "--out", "rows.json")[0] == 0
    objects = json.loads((tmp_path / "rows.json").read_text())
    assert [each["trial_id"] for each in objects] == [row["trial_id"] for row in rows]
    for words in (("--format", "xml"), ("--out", "no/such/folder.csv")):
        refusal(capfd, "export", campaign, *words)
