"""Machines on which a program or a driver does not answer as it should, by the real command line."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pynvml
import pytest

import sp_bench
from sp_bench import programs
from sp_bench.rows import git

from .console import console, refusal

SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=1", "kernel=math")
ON_CPU = ("method=single", "sp_size=1", "seq_len=96", *SMALL, "--no-report")
ON_GPU = ("method=single", "sp_size=1", "hardware=h100", "fabric=nvlink", "kernel=cudnn", "dtype=bfloat16")


@pytest.fixture(params=[18, 999, 4])
def broken_driver(request, monkeypatch, tmp_path) -> None:
    def fails() -> None:
        raise pynvml.NVMLError(request.param)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    monkeypatch.chdir(tmp_path)


def test_a_driver_that_does_not_answer_stops_work_on_gpus_only(broken_driver, capfd):
    code, printed, _ = console(capfd, "plan", *ON_GPU)
    assert code == 0
    assert "does not answer" in " ".join(printed.split())
    assert "the NVIDIA driver does not answer (NVML: " in refusal(capfd, "run", *ON_GPU)
    assert "the NVIDIA driver does not answer (NVML: " in refusal(capfd, "plan", "hardware=device", *ON_GPU[:2])
    assert console(capfd, "run", *ON_CPU, "campaign=c")[0] == 0
    assert console(capfd, "submit", *ON_CPU[:-1], "campaign=c", "--cluster", "slurm", "--dry-run")[0] == 0


def test_doctor_says_that_the_driver_does_not_answer(broken_driver, capfd):
    code, printed, _ = console(capfd, "doctor")
    assert code == 0
    assert "the NVIDIA driver does not answer" in " ".join(printed.split())


def test_work_on_a_gpu_in_mig_mode_is_refused_with_the_way_out(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    answers = {"DeviceGetCount": lambda: 1, "DeviceGetMigMode": lambda gpu: [1, 1], "Init": lambda: None}
    answers |= {name: lambda: None for name in ("Shutdown", "SystemGetDriverVersion")}
    answers |= {"DeviceGetName": lambda gpu: "NVIDIA H100 80GB HBM3", "DeviceGetUUID": lambda gpu: "GPU-7"}
    answers |= {"DeviceGetHandleByIndex": lambda i: i, "DeviceGetCudaComputeCapability": lambda gpu: (9, 0)}
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for words in (("run", *ON_GPU), ("plan", "hardware=device", *ON_GPU[:2]), ("doctor", "--gpus")):
        said = refusal(capfd, *words)
        assert "GPU-7 is in MIG mode" in said
        assert "nvidia-smi -i UUID -mig 0" in said


def version(**variables: str) -> str:
    command = [sys.executable, "-m", "sp_bench", "--version"]
    root = str(Path(sp_bench.__file__).parents[1])
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | variables, check=True)
    return done.stdout


def test_the_commit_is_that_of_the_code_whatever_git_was_pointed_at(tmp_path):
    other = tmp_path / "other"
    subprocess.run(["git", "init", "-q", str(other)], check=True)
    author = ("-c", "user.email=a@b", "-c", "user.name=n")
    subprocess.run(["git", "-C", str(other), *author, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    pointed = version(GIT_DIR=str(other / ".git"), GIT_WORK_TREE=str(other), GIT_INDEX_FILE=str(other / "index"))
    assert pointed == version()


@pytest.mark.parametrize("script", ["sleep 20", "echo 'fatal: detected dubious ownership' >&2; exit 128", "kill -9 $$"])
def test_a_git_that_does_not_answer_is_one_warning_and_the_run_goes_on(script, tmp_path, monkeypatch, capfd):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(programs.answer.__kwdefaults__, "limit_s", 0.2)
    git._warn_once.cache_clear()
    code, _, err = console(capfd, "run", *ON_CPU, "campaign=slow")
    assert code == 0
    if (git.PACKAGE.parent / ".git").exists():
        assert err.count("stays unknown: git ") == 1
    (row,) = sp_bench.load(["results/slow"]).itertuples()
    assert row.git_sha is None or row.git_sha.startswith("tree:")


@pytest.mark.parametrize("name", ["2024_11_29", "1e5", "null"])
def test_a_campaign_has_the_name_that_was_typed(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert console(capfd, "run", *ON_CPU, f"campaign={name}")[0] == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == [name]


def test_results_may_lie_in_a_folder_with_any_printable_name(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert console(capfd, "run", *ON_CPU, "campaign=c", "results_root=a=b, (c) [d] {e}")[0] == 0
    assert len(sp_bench.load([tmp_path / "a=b, (c) [d] {e}" / "c"])) == 1


def test_what_load_gives_can_be_written_to_a_file_again(tmp_path):
    root = Path(sp_bench.__file__).parents[1] / "results"
    rows = sp_bench.load([root / "h200x4_headline_fresh"])
    rows.to_parquet(tmp_path / "rows.parquet")
    again = pd.read_parquet(tmp_path / "rows.parquet")
    assert again["phase_s"].tolist() == rows["phase_s"].tolist()
    assert again.shape == rows.shape


RC = "font.family: monospace\npdf.fonttype: 3\naxes.facecolor: black\ntext.color: white\npath.sketch: 1, 10, 1\n"


def test_a_matplotlibrc_of_the_readers_changes_no_figure(tmp_path):
    campaign = str(Path(sp_bench.__file__).parents[1] / "results" / "h200x4_headline_fresh")
    written = []
    for rc in ("", RC):
        folder = tmp_path / ("dark" if rc else "plain")
        folder.mkdir()
        (folder / "matplotlibrc").write_text(rc)
        command = [sys.executable, "-m", "sp_bench", "report", campaign, "--only", "ratios", "--out", "out"]
        path = os.pathsep.join([str(Path(sp_bench.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, check=True, capture_output=True)
        written.append({each.name: each.read_bytes() for each in (folder / "out" / "figures").iterdir()})
    assert written[0] == written[1]
