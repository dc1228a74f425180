import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from sp_bench.rows import campaign_file, plans, proofs, store

from .console import console, refusal

ROOT = Path(__file__).parents[2]
SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2", "kernel=math")
SINGLE = ("method=single", "sp_size=1", "seq_len=96", *SMALL)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sp_bench", "run", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a test run in the background of a shell ignores interrupts, and its children would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )


def trial_processes(folder: Path) -> list[psutil.Process]:
    """Processes that work in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_every_trial_of_a_sweep_leaves_one_row_that_pandas_reads(finished):
    folder, _, _ = finished
    frame = pd.read_parquet(folder / "results" / "small").set_index("method")
    assert frame["status"].to_dict() == {"ring": "ok", "ulysses": "unsupported"}
    ring, ulysses = frame.loc["ring"], frame.loc["ulysses"]
    assert ring["median_step_ms"] > 0
    assert len(ring["rank_step_ms"]) == 3
    assert ring["comm_counted_bytes"] == ring["comm_predicted_bytes"] > 0
    assert ring["phase"] == "done"
    assert "1, 2, 4, 8" in ulysses["reason"]
    assert ulysses["phase"] == "plan"
    assert pd.isna(ulysses["median_step_ms"])


def test_a_step_with_yarn_is_right_and_its_row_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    yarn = ("model.rope_scaling=yarn", "model.rope_factor=4", "model.rope_original_seq_len=48")
    words = ("workload=train_step", "method=ring", "sp_size=2", "seq_len=256", *yarn, *SMALL)
    code, _, err = console(capfd, "run", *words, "--no-report")
    assert code == 0, err
    row = pd.read_parquet(tmp_path / "results" / "default").iloc[0]
    assert (row["status"], row["rope_scaling"], row["rope_factor"]) == ("ok", "yarn", 4)
    assert row["rope_original_seq_len"] == 48


def test_a_run_leaves_nothing_beside_its_results(finished):
    folder, _, _ = finished
    assert [path.name for path in folder.iterdir()] == ["results"]
    beside = {path.name for path in (folder / "results" / "small").iterdir() if path.suffix != ".parquet"}
    assert beside == {store.WORK, plans.FOLDER, proofs.FOLDER, campaign_file.NAME}


def test_a_run_writes_its_words_beside_its_rows(finished):
    folder, arguments, _ = finished
    [command] = campaign_file.read(folder / "results" / "small").commands
    assert command.words == f"sp-bench run -m {' '.join(arguments)}"
    assert command.commit == pd.read_parquet(folder / "results" / "small")["git_sha"].iloc[0]


def test_a_run_ends_with_its_counts_and_where_the_report_is(finished):
    folder, _, printed = finished
    *_, summary, last = printed.splitlines()
    counts, effort, rows = re.split(r"; (?!timed)", summary)
    assert counts == "2 trials: 1 ok, 1 unsupported, 0 oom, 0 failed"
    assert re.fullmatch(r"measuring took [\d.]+ of the campaign's [\d.]+ s \(\d+%; timed steps \d+%\)", effort)
    assert rows == "rows: results/small"
    assert last == "report: results/small/_work/report/index.html"
    assert (folder / last.removeprefix("report: ")).is_file()


def test_progress_is_plain_lines_without_a_terminal(finished):
    _, _, printed = finished
    assert "\x1b" not in printed
    assert "[1/2] unsupported: ulysses" in printed
    assert re.search(r"\[2/2\] ok \d+ s: ring .*: [\d.]+ ms a step \(1 ok", printed)
    assert "0 left" in printed


def test_a_second_run_does_nothing(finished, monkeypatch, capfd):
    folder, arguments, _ = finished
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in (folder / "results" / "small").glob("*.parquet")}
    code, printed, errors = console(capfd, "run", *arguments)
    assert code == 0, errors
    assert "2 of 2 trials are committed already" in printed
    assert {path: path.stat().st_mtime_ns for path in (folder / "results" / "small").glob("*.parquet")} == before


def test_a_run_says_what_to_do_about_a_row_that_cannot_be_read(finished, tmp_path, monkeypatch, capfd):
    folder, arguments, _ = finished
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "results", tmp_path / "results")
    torn = next((tmp_path / "results" / "small").glob("*-ok.parquet"))
    torn.write_bytes(torn.read_bytes()[:-9])
    _, printed, _ = console(capfd, "run", *arguments)
    assert f"{torn.name}: " in printed
    assert "move its file away, and a run measures that trial again" in printed


def test_a_phase_that_passes_its_deadline_is_a_timeout_row_and_the_sweep_goes_on(command, tmp_path):
    done = command("run", "method=single", "sp_size=1", "seq_len=96,97", *SMALL, "deadlines.init=0.2", "--no-report")
    assert done.returncode == 1, done.stderr
    table, problems = store.read(tmp_path / "results" / "default")
    assert problems == []
    assert table["status"].to_pylist() == ["timeout", "timeout"]
    assert all("phase init passed its deadline of 0.2 s" in reason for reason in table["reason"].to_pylist())
    assert table["environment"].to_pylist()[0]["cpu"]


def started(run: subprocess.Popen[str], folder: Path) -> None:
    """Wait until a rank of the trial is at work."""
    deadline = time.monotonic() + 60
    while not list((folder / "results").glob("default/_work/trials/*/rank0.events.jsonl")):
        assert run.poll() is None, run.stderr.read() if run.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_machine_taken_away_leaves_a_preempted_row_that_resume_retries(command, tmp_path):
    words = (*SINGLE, "--no-report")
    run = start(tmp_path, *words)
    started(run, tmp_path)
    run.send_signal(signal.SIGTERM)
    printed, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, errors
    assert "interrupted, 0 left" in printed
    assert trial_processes(tmp_path) == []
    resumed = command("resume", *words)
    assert resumed.returncode == 0, resumed.stderr
    rows = store.committed(tmp_path / "results" / "default")
    assert sorted((row.attempt, row.status) for row in rows) == [(0, "preempted"), (1, "ok")]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_running_trial_says_what_is_left_and_leaves_nothing_behind(tmp_path, times):
    run = start(tmp_path, "method=ring", "seq_len=96,192", *SMALL)
    started(run, tmp_path)
    for _ in range(times):
        run.send_signal(signal.SIGINT)
    printed, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert "Traceback" not in errors
    if times == 1:
        assert "interrupted, 2 left" in printed
    folder = tmp_path / "results" / "default"
    assert trial_processes(tmp_path) == []
    assert list(store.committed(folder)) == []
    assert list((folder / "_work").glob("claims/*")) == []


@pytest.mark.parametrize(
    ("imported", "words"),
    [
        ("sp_bench.cli", ["run", *SINGLE]),
        ("typer", ["run", *SINGLE]),
        ("rich.markup", ["status"]),
        ("typer.rich_utils", ["status"]),  # words an error, outside of what hears a Ctrl-C
        ("pyarrow", ["status", "."]),
        ("hydra", ["run", *SINGLE]),
    ],
)
def test_ctrl_c_while_a_command_imports_is_one_line(tmp_path, imported, words):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupts:\n"
        "    def find_spec(name, path, target=None):\n"
        f"        if name == {imported!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "sp_bench", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sp-bench: interrupted\n")


def test_ctrl_c_where_exceptions_are_ignored_ends_the_program_too(tmp_path):
    script = (
        "import os, signal\n"
        "from sp_bench.__main__ import _unwind\n"
        "class Ends:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        range(1)\n"
        "signal.signal(signal.SIGINT, _unwind)\n"
        "Ends()\n"
        "print('goes on')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sp-bench: interrupted\n")


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6])
def test_ctrl_c_at_any_time_is_one_line(tmp_path, delay_s):
    script = (
        "import os, signal\n"
        "from sp_bench.__main__ import main\n"
        "heard_by = signal.getsignal\n"
        "signal.getsignal = lambda number: os.write(1, b'.') and heard_by(number)\n"  # its first call
        "main()\n"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", script, "status", "."],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    assert os.read(command.stdout.fileno(), 1) == b"."
    time.sleep(delay_s)
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    if errors:
        assert (command.returncode, errors) == (130, b"sp-bench: interrupted\n")
    else:  # it had ended, or all but the process
        assert command.returncode in (0, -signal.SIGINT)


def test_a_python_that_cannot_start_ranks_is_named_and_not_the_folder_of_results(tmp_path, monkeypatch, capfd):
    python = tmp_path / "python"
    python.write_text("no program")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    code, _, err = console(capfd, "run", *SINGLE, "--no-report")
    assert code == 2
    assert f"{python} cannot be started as rank 0: Permission denied; check that {python} can be executed" in err
    assert "cannot write" not in err
    assert list(store.committed(tmp_path / "results" / "default")) == []


def test_two_runs_of_one_campaign_share_its_trials(tmp_path):
    runs = [start(tmp_path, *SINGLE[:2], "seq_len=96,97", *SMALL, "--no-report") for _ in range(2)]
    for run in runs:
        printed, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors
        # the second may begin when the first has committed a trial
        (ok,) = re.findall(r"^2 trials: (\d) ok", printed, re.MULTILINE)
        assert int(ok) + sum(map(int, re.findall(r"(\d) committed before", printed))) == 2, printed
    assert [row.status for row in store.committed(tmp_path / "results" / "default")] == ["ok"] * 2
    assert len(list((tmp_path / "results" / "default" / "_work" / "trials").iterdir())) == 2


def test_a_results_folder_that_cannot_be_written_is_one_clear_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    line = refusal(capfd, "run", *SINGLE, "results_root=file/results")
    assert "cannot write results to file/results/default" in line
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_trials_of_a_group_share_their_processes_and_a_replicate_is_a_launch_of_its_own(command, tmp_path, monkeypatch):
    started = tmp_path / "started.txt"
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(
        f"import os\nif 'RANK' in os.environ:\n    open({str(started)!r}, 'a').write('a rank\\n')\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "hook"), os.environ.get("PYTHONPATH", "")]))
    shared = ("method=ulysses,ring", "sp_size=1", "seq_len=96", "isolation=group", "campaign=g", *SMALL)
    done = command("run", *shared, "replicates=2", "--no-report")
    assert done.returncode == 0, done.stderr
    frame = pd.read_parquet(tmp_path / "results" / "g")
    assert frame["status"].tolist() == ["ok"] * 4
    assert frame["isolation"].unique().tolist() == ["group"]
    assert len(started.read_text().splitlines()) == 2, "two replicates of a rank"
    assert not trial_processes(tmp_path)


def test_a_failure_ends_its_group_and_the_rest_goes_on_in_a_new_one(command, tmp_path):
    # the driver looks ten times a second, so the proof must take longer
    long = (
        "seq_len=1024",
        "workload.correctness_seq_len=1024",
        *(option for option in SMALL if "correctness" not in option),
    )
    shared = ("method=single,ring", "sp_size=1", "isolation=group", "campaign=g", *long)
    done = command("run", *shared, "deadlines.correctness=0.001", "--no-report")
    assert done.returncode == 1, done.stderr
    frame = pd.read_parquet(tmp_path / "results" / "g")
    assert frame["status"].tolist() == ["timeout", "timeout"]
    assert not trial_processes(tmp_path)


def test_ranks_run_the_code_of_the_checkout_that_planned_them(tmp_path):
    """Not that of the checkout which this Python has installed; and what a rank said before it had a log is told."""
    for folder in ("sp_bench", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    worker = tmp_path / "sp_bench" / "worker.py"
    worker.write_text(worker.read_text().replace("import os\n", "raise RuntimeError('of this checkout')\n", 1))
    run = [sys.executable, "-m", "sp_bench", "run", *SINGLE, "--no-report"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert "in phase init: RuntimeError: of this checkout; " in done.stdout, done.stdout + done.stderr
