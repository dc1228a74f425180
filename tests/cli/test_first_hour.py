"""What a new user, and an engineer with a cluster, meet first: by the real command line."""

import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pandas as pd
import pytest
import typer

from sp_bench.cli.options import FAILURES, exit_if_failed
from sp_bench.rows import store

from .console import console, refusal

ROOT = Path(__file__).parents[2]
SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2", "kernel=math")
SINGLE = ("method=single", "sp_size=1", "seq_len=96", *SMALL)
TOGETHER = ("isolation=group", "--no-report")  # where processes of their own prove nothing: one launch


def sp_bench(folder: Path, *words: str, before: tuple[str, ...] = (), **variables: str):
    """`sp-bench ...` in `folder`; `before`: the words of a program that starts it."""
    command = [*before, sys.executable, "-m", "sp_bench", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | variables)


NAMELESS = ("unshare", "--map-root-user", "--uts", "sh", "-c", 'hostname nowhere-at-all && exec "$@"', "sh")


@pytest.fixture
def nameless() -> tuple[str, ...]:
    """Words before a command that give the machine a host name that does not resolve."""
    if not shutil.which("unshare") or subprocess.run([*NAMELESS, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here, so the host name cannot be changed for one process")
    return NAMELESS


def test_a_host_name_that_does_not_resolve_hinders_no_trial(tmp_path, nameless):
    done = sp_bench(tmp_path, "run", "method=ring", "sp_size=2", "seq_len=96", *SMALL, "--no-report", before=nameless)
    assert done.returncode == 0, done.stderr
    assert "1 trial: 1 ok" in done.stdout


def test_doctor_says_that_the_host_name_does_not_resolve(tmp_path, nameless):
    done = sp_bench(tmp_path, "doctor", before=nameless)
    assert "nowhere-at-all does not resolve; ranks meet at 127.0.0.1" in done.stdout, done.stderr


def test_a_timeout_quotes_the_last_line_of_the_log(tmp_path):
    (tmp_path / "hook").mkdir()
    slow = "    print('asking the licence server', flush=True)\n    time.sleep(60)\n"
    (tmp_path / "hook" / "sitecustomize.py").write_text(f"import os, time\nif 'RANK' in os.environ:\n{slow}")
    path = os.pathsep.join([str(tmp_path / "hook"), os.environ.get("PYTHONPATH", "")])
    sp_bench(tmp_path, "run", *SINGLE, "deadlines.init=2", "--no-report", PYTHONPATH=path)
    (reason,) = pd.read_parquet(tmp_path / "results" / "default")["reason"]
    assert reason == (
        "phase init passed its deadline of 2 s in rank 0; the last line of rank 0: asking the licence server"
    )


def in_a_terminal(folder: Path, *words: str) -> str:
    """What `sp-bench ...` writes to a terminal of 100 columns, without its escapes; \\r and \\n are as they came."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-m", "sp_bench", *words]
    run = subprocess.Popen(
        command, cwd=folder, stdin=terminal, stdout=terminal, stderr=terminal, env=os.environ | {"TERM": "xterm"}
    )
    os.close(terminal)
    written = b""
    while True:
        try:
            more = os.read(master, 65536)
        except OSError:  # the last process has closed it
            break
        written += more
    os.close(master)
    assert run.wait() == 0, written
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


@pytest.mark.parametrize(
    ("words", "record"),
    [
        (("methods",), "method: ulysses; library: sp_bench; moves: all_to_all; kernels: all;"),
        (("project", "--gpus", "16", "--seq-len", "262144"), "GPUs: 16; tokens: 262,144; method: ring over 4;"),
    ],
)
def test_a_table_that_is_wider_than_the_terminal_is_a_record_a_line_and_breaks_no_word(tmp_path, words, record):
    lines = re.split(r"[\r\n]+", in_a_terminal(tmp_path, *words))
    (place,) = (i for i, line in enumerate(lines) if record in line)
    following = [lines[place], *lines[place + 1 :]]
    end = next(i for i, line in enumerate(following[1:], 1) if not line.startswith("    "))
    assert max(map(len, following[1:end])) <= 100
    assert "|" not in lines[place]


def test_the_live_panel_shows_counts_what_is_left_and_the_eta(tmp_path):
    # with a launch each, so that the panel is seen between them
    words = ("method=single", "sp_size=1", "seq_len=96,97", *SMALL, "--no-report")
    lines = re.split(r"[\r\n]+", in_a_terminal(tmp_path, "run", *words))
    heads = [line for line in lines if " done: " in line]
    assert any(re.fullmatch(r"0/2 done: 0 ok, 0 unsupported, 0 oom, 0 failed, 2 left *", line) for line in heads), heads
    assert any(re.fullmatch(r"1/2 done: 1 ok, .*, 1 left, ETA \d+ s *", line) for line in heads), heads
    assert any(re.match(r"(init|correctness|warmup|measure) \d+ s: single ", line) for line in lines)


EVENTS = "results/*/_work/trials/*/rank0.events.jsonl"
HOLD = """
import os, pathlib, time
if "RANK" in os.environ:
    from sp_bench import handover
    handover.enter_phase(pathlib.Path.cwd(), int(os.environ["RANK"]), "init")
    while not os.path.exists({go!r}):
        time.sleep(0.02)
"""


@contextmanager
def held(folder: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run whose ranks have begun and stand still. They go on at the end, which waits for the run's."""
    go = folder / "go"
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOLD.format(go=str(go)))
    path = os.pathsep.join([str(folder / "hook"), os.environ.get("PYTHONPATH", "")])
    before = begun = set(folder.glob(EVENTS))
    run = subprocess.Popen(
        [sys.executable, "-m", "sp_bench", "run", *words],
        cwd=folder,
        env=os.environ | variables | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
    )
    try:
        while begun <= before:
            assert run.poll() is None
            time.sleep(0.05)
            begun = set(folder.glob(EVENTS))
        yield run
    finally:
        go.touch()
        run.wait()


def test_two_runs_with_folders_for_temporary_files_of_their_own_take_turns(tmp_path):
    """As two jobs of Slurm have."""
    for name in ("a", "b"):
        (tmp_path / name / "tmp").mkdir(parents=True)
    second = [sys.executable, "-m", "sp_bench", "run", *SINGLE, "--no-report"]
    variables = os.environ | {"TMPDIR": str(tmp_path / "b" / "tmp")}
    with held(tmp_path / "a", *SINGLE, "--no-report", TMPDIR=str(tmp_path / "a" / "tmp")) as first:
        waiting = subprocess.Popen(second, cwd=tmp_path / "b", env=variables, stdout=subprocess.PIPE, text=True)
        assert waiting.stdout is not None
        assert any("another run is measuring on this machine; waiting for it" in line for line in waiting.stdout)
    assert first.returncode == 0
    assert "1 trial: 1 ok" in waiting.communicate()[0]
    times = [pd.read_parquet(tmp_path / name / "results" / "default").loc[0] for name in ("a", "b")]
    assert times[0]["started_at"] + pd.Timedelta(seconds=times[0]["duration_s"]) <= times[1]["started_at"]


def test_a_row_says_that_others_worked_here_while_it_was_measured(tmp_path):
    words = (*(word for word in SINGLE if "timed_steps" not in word), "workload.timed_steps=300", "--no-report")
    run = subprocess.Popen([sys.executable, "-m", "sp_bench", "run", *words], cwd=tmp_path)
    while not list(tmp_path.glob(EVENTS)):
        assert run.poll() is None
        time.sleep(0.1)
    # nice, so that they take what is left of the processors and hinder neither the run nor other tests
    burner = ["nice", "-n", "19", sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(burner) for _ in os.sched_getaffinity(0)]
    try:
        assert run.wait() == 0
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    (flags,) = pd.read_parquet(tmp_path / "results" / "default")["flags"]
    assert "foreign_load" in flags


def test_untracked_files_beside_the_code_do_not_make_rows_dirty(tmp_path):
    """As the log of the job, which Slurm writes where it was submitted."""
    copy = tmp_path / "checkout"
    for name in ("sp_bench", "conf"):
        shutil.copytree(ROOT / name, copy / name)
    (copy / ".gitignore").write_text("__pycache__\n")
    git = ["git", "-C", str(copy), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    (copy / "slurm-17.out").write_text("said")
    (copy / "conf" / "sweep" / "mine.yaml").write_text(
        "# @package _global_\ncampaign: mine\nsweep:\n  blocks:\n    - method: single\n      sp_size: [3]\n"
    )
    run = ("run", "method=ulysses", "sp_size=3", "--no-report")  # a row at once: 8 heads cannot be split over 3
    for campaign, dirty in (("with_mine", True), ("without", False)):
        sp_bench(copy, *run, f"campaign={campaign}", PYTHONPATH=str(copy))
        (row,) = pd.read_parquet(copy / "results" / campaign).to_dict("records")
        assert row["git_dirty"] == dirty
        (copy / "conf" / "sweep" / "mine.yaml").unlink(missing_ok=True)


def test_a_run_of_which_a_trial_failed_ends_with_1_and_so_does_each_later_one(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = ("method=single", "sp_size=1", "seq_len=96", *SMALL)
    broken = ("method=single,ring", "deadlines.init=0.1", "--no-report")
    failed = command("run", *words[1:], *broken)
    assert (failed.returncode, failed.stderr) == (1, "sp-bench: the latest rows of trials are 2 timeout\n")
    assert "report:" not in failed.stdout
    code, printed, _ = console(capfd, "run", *words[1:], *broken)
    assert "2 of 2 trials are committed already" in printed
    assert code == 1
    assert console(capfd, "run", *words[1:], *broken, "--fail-on", "error,oom")[0] == 0
    assert console(capfd, "resume", *words[1:], *broken, "--fail-on=none")[0] == 0
    resumed = command("resume", *words, "--no-report")
    assert (resumed.returncode, resumed.stderr) == (0, "")


def test_what_fail_on_does_not_know_is_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    line = refusal(capfd, "run", *SINGLE, "--fail-on", "errors")
    assert line.startswith("sp-bench: --fail-on errors: errors is no status; use some of ok, unsupported, ")


def test_a_failed_trial_names_itself_and_its_logs_and_show_tells_all_of_it(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = ("method=ring", "method.layout=striped", "sp_size=2", "seq_len=98", "seed=3", *SMALL)
    done = command("run", *words, "deadlines.correctness=0.001", "--no-report")
    (trial, folder) = re.findall(r"; trial ([0-9a-f]{12}), logs: (results/default/_work/trials/\S+) \(", done.stdout)[0]
    assert sorted(path.name for path in (tmp_path / folder).glob("*.log")) == ["rank0.log", "rank1.log"]
    code, shown, errors = console(capfd, "show", trial[:6])
    assert code == 0, errors
    assert "attempt 0 in " in shown
    assert re.search(r"^reason +phase correctness passed its deadline of 0.001 s", shown, re.MULTILINE)
    assert f"{folder}/rank1.log, its last lines:" in shown
    (repeat,) = re.findall(r"^repeat it alone: sp-bench (.*)$", shown, re.MULTILINE)
    again = command(*shlex.split(repeat), "--no-report")
    assert again.returncode == 0, again.stderr
    cells = [set(pd.read_parquet(tmp_path / "results" / name)["cell_id"]) for name in ("default", "repeated")]
    assert cells[0] == cells[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["abcdef"],
            "no row of a trial abcdef in results/; name the campaign's folder after it: sp-bench show abcdef FOLDER",
        ),
        (
            ["ring"],
            "ring is no trial_id: give its 12 hex digits, or 4 and more of them; `sp-bench export FOLDER` and the "
            "page's appendix list them",
        ),
        (["abcdef", "nowhere"], "nowhere is not a folder of results"),
    ],
)
def test_show_of_a_trial_that_is_not_there_is_one_line(tmp_path, monkeypatch, capfd, words, message):
    monkeypatch.chdir(tmp_path)
    assert refusal(capfd, "show", *words) == f"sp-bench: {message}"


def rows_in(folder: Path, *statuses: str) -> list[Path]:
    """Files named as rows, one of each status."""
    folder.mkdir(parents=True)
    paths = [
        folder / store.RowName(f"{n:012x}", "01234567", 0, status).file_name for n, status in enumerate(statuses, 1)
    ]
    for path in paths:
        path.touch()
    return paths


def test_a_reader_that_goes_away_ends_no_campaign(tmp_path):
    words = shlex.join([sys.executable, "-m", "sp_bench", "run", *SINGLE[:2], "seq_len=96,97", *SMALL, *TOGETHER])
    script = f"set -o pipefail; {words} | head -1"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row.status for row in store.committed(tmp_path / "results" / "default")] == ["ok", "ok"]


def test_output_to_a_full_disk_is_one_line_and_the_rows_stay(tmp_path):
    for words in (("run", *SINGLE, "--no-report"), ("status", "results/default")):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "sp_bench", *words]
            done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (2, "sp-bench: what was printed is lost: No space left on device\n")
    assert [row.status for row in store.committed(tmp_path / "results" / "default")] == ["ok"]


@pytest.mark.parametrize("words", [("status", "results"), ("run", *SINGLE), ("plan", *SINGLE), ("doctor",)])
def test_a_working_folder_that_was_deleted_is_one_line(tmp_path, words):
    script = f"mkdir here && cd here && rmdir ../here && {shlex.join([sys.executable, '-m', 'sp_bench', *words])}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("sp-bench: the working folder was deleted"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_plain_file_among_campaigns_is_passed_over(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rows_in(tmp_path / "results" / "night", "ok", "error")
    (tmp_path / "results" / "README.md").write_text("words")
    code, printed, errors = console(capfd, "status", "results/README.md", "results/night")
    assert (code, errors) == (0, "sp-bench: results/README.md is not a folder of results; passed over\n")
    assert "night" in printed
    assert "is not a folder of results" in refusal(capfd, "status", "results/README.md")


def test_a_report_goes_into_no_folder_that_holds_something_else(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rows_in(tmp_path / "results" / "night", "ok")
    rows_in(tmp_path / "results" / "other", "ok")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    words = ("report", "results/night", "--out")
    assert "has files that no report made, such as chapter.tex" in refusal(capfd, *words, "thesis")
    assert "lies among the rows of other" in refusal(capfd, *words, "results/other/page")
    assert sorted(path.name for path in (tmp_path / "thesis").iterdir()) == ["chapter.tex"]


def test_rm_says_what_it_would_move_and_moves_it_when_told(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    ok, error, unsupported = rows_in(tmp_path / "results" / "night", "ok", "error", "unsupported")
    words = ("rm", "results/night", "--status", "ok,unsupported")
    code, printed, _ = console(capfd, *words)
    assert code == 0
    assert printed.splitlines() == [
        "1 row that is ok left; --force takes them as well",
        unsupported.name,
        "1 row would be moved; --yes moves them",
    ]
    assert unsupported.exists()
    code, printed, _ = console(capfd, *words, "--yes")
    assert code == 0
    (moved,) = (tmp_path / "results" / "night" / "_work" / "removed").glob("*/*")
    assert printed.splitlines()[-1] == f"1 row moved to {moved.parent.relative_to(tmp_path)}"
    assert (ok.exists(), error.exists(), unsupported.exists()) == (True, True, False)
    console(capfd, "rm", "results/night", "--trial", ok.name[:12], "--yes", "--force")
    assert (ok.exists(), error.exists()) == (False, True)
    assert console(capfd, "rm", "results/night", "--status", "timeout", "--yes")[1] == "no such rows\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say which rows: --status error,timeout, --trial TRIAL_ID or --cell CELL_ID"),
        (("--status", "bad"), "--status bad: bad is no status"),
        (("--trial", ""), "an empty text is no id: give its 12 hex digits"),
        (("--cell", "0a"), "0a is no id: give its 12 hex digits"),
    ],
)
def test_rm_moves_nothing_without_being_told_what(tmp_path, capfd, words, message):
    (row,) = rows_in(tmp_path / "night", "error")
    assert message in refusal(capfd, "rm", str(tmp_path / "night"), *words, "--yes")
    assert row.exists()


def test_a_typo_that_became_a_row_runs_after_rm(finished, tmp_path, monkeypatch, capfd):
    """By its cell, which the rows say and their names do not."""
    monkeypatch.chdir(tmp_path)
    folder, arguments, _ = finished
    shutil.copytree(folder / "results", tmp_path / "results")
    frame = pd.read_parquet(tmp_path / "results" / "small").set_index("method")
    cell = frame.loc["ulysses", "cell_id"]
    _, moved, errors = console(capfd, "rm", "results/small", "--cell", cell, "--yes")
    assert "1 row moved to" in moved, errors
    assert "1 done, 1 unsupported" in console(capfd, "plan", *arguments)[1]


def test_status_says_what_runs_where_what_is_left_and_why_trials_failed(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = (*SINGLE[:2], "seq_len=96,97", *SMALL, "--no-report")
    failed = command("run", *SINGLE, "--no-report", "deadlines.init=0.1")
    assert failed.returncode == 1
    with held(tmp_path, *words) as run:
        said = console(capfd, "status", "results/default")[1].splitlines()
        (told,) = json.loads(console(capfd, "status", "results/default", "--json")[1])
    assert run.returncode == 1, "one trial has failed"
    (after,) = json.loads(console(capfd, "status", "results/default", "--json")[1])
    assert said[2].startswith("default: 1 of 2 planned left")
    assert re.fullmatch(rf"  trial [0-9a-f]{{12}}: in \w+ for \d+ s, process {run.pid} on \S+", said[3])
    assert re.fullmatch(r"  1 timeout: phase init passed its deadline of 0.1 s in rank 0.* \(trial \w{12}\)", said[4])
    assert (told["planned"], told["left"], told["counts"]["timeout"], len(told["running"])) == (2, 1, 1, 1)
    assert (after["planned"], after["left"], after["counts"]["ok"], after["running"]) == (2, 0, 1, [])
    assert after["failures"][0]["reason"].startswith("phase init passed its deadline")


def test_every_verb_that_shows_something_prints_json_when_asked(finished, capfd, monkeypatch):
    folder, arguments, _ = finished
    monkeypatch.chdir(folder)

    def printed(*words: str):
        code, out, errors = console(capfd, *words, "--json")
        assert (code, errors) == (0, "")
        return json.loads(out)

    trials = {trial["config"]["method"]["name"]: trial for trial in printed("plan", *arguments)["trials"]}
    assert (trials["ring"]["status"], trials["ulysses"]["status"]) == ("ok", "unsupported")
    assert "1, 2, 4, 8" in trials["ulysses"]["unsupported_reason"]
    assert printed("status", "results/small")[0]["counts"]["ok"] == 1
    assert printed("doctor")["libraries"]["torch"]
    assert {"ring", "ulysses"} <= {method["method"] for method in printed("methods")}
    compared = printed("compare", "results/small", "results/small")
    assert (compared["pairs"][0]["ratio"], compared["pairs"][0]["verdict"]) == (1.0, "no interval")


def test_the_version_names_the_commit(capfd):
    code, printed, _ = console(capfd, "--version")
    assert code == 0
    assert re.fullmatch(r"sp-bench \d+\.\d+\.\d+( \([0-9a-f]{12}(, with uncommitted changes)?\))?\n", printed)


def test_the_help_of_run_shows_groups_and_keys_with_their_meaning(capfd):
    _, printed, _ = console(capfd, "run", "--help")
    assert "method, engine, kernel" in printed or "method, kernel" in printed
    for key in ("seq_len", "workload.micro_batches", "hardware.device_memory_gib", "deadlines.init", "replicates"):
        assert re.search(rf"(^|[ ,]){re.escape(key)}[ ,\n]", printed), key
    assert "global tokens of one sequence (tokens)" in printed


def test_help_and_status_import_little(tmp_path):
    """They are to start at once: help without what reads rows, status without what plans and runs."""
    rows_in(tmp_path / "night", "ok")
    code = (
        "import sys; from sp_bench import cli; sys.argv = ['sp-bench', *{}]\ntry: cli.main()\nexcept SystemExit: pass\n"
    )
    code += "print([name for name in {} if name in sys.modules], file=sys.stderr)"
    for words, absent in (
        (["--help"], ["pyarrow", "numpy", "hydra", "torch"]),
        (["run", "--help"], ["pyarrow", "numpy", "hydra", "torch"]),
        (["status", str(tmp_path / "night")], ["hydra", "torch", "sp_bench.methods"]),
    ):
        done = subprocess.run([sys.executable, "-c", code.format(words, absent)], capture_output=True, text=True)
        assert done.stderr.splitlines()[-1] == "[]", done.stderr


def committed(folder: Path) -> list[Path]:
    return sorted(folder / row.file_name for row in store.committed(folder))


def test_resume_of_a_folder_continues_its_commands(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = (*SINGLE[:2], *SMALL, "campaign=half", *TOGETHER)
    assert console(capfd, "run", *words, "seq_len=96")[0] == 0
    assert console(capfd, "run", *words, "seq_len=128")[0] == 0
    rows = committed(tmp_path / "results" / "half")
    assert len(rows) == 2
    rows[0].unlink()
    code, out, err = console(capfd, "resume", "results/half", "--no-report")
    assert (code, err) == (0, "")
    assert out.count("sp-bench resume ") == 2
    assert committed(tmp_path / "results" / "half") == rows
    assert "has no commands to continue" in refusal(capfd, "resume", str(tmp_path), "--no-report")
    _, out, _ = console(capfd, "resume", "results/half", "--no-report")
    assert out.count("sp-bench resume ") == 2, "what it recorded itself is the same command"


def test_status_lists_what_a_narrower_resume_did_not_plan(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = (*SINGLE[:2], *SMALL, "campaign=half", *TOGETHER)
    assert console(capfd, "run", *words, "seq_len=96,128,160")[0] == 0
    for row in committed(tmp_path / "results" / "half"):
        row.unlink()
    assert console(capfd, "resume", *words, "seq_len=96")[0] == 0
    (status,) = json.loads(console(capfd, "status", "results/half", "--json")[1])
    assert (status["planned"], status["left"]) == (3, 2)


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ({"ok": 2, "unsupported": 1}, 0),
        ({"ok": 2, "oom": 1}, 0),
        ({"ok": 1, "preempted": 1}, 1),
        ({"ok": 1, "missing": 1}, 1),
        ({"unsupported": 2}, 1),
        ({"unsupported": 2, "missing": 0}, 1),
        ({}, 0),
    ],
)
def test_a_campaign_that_is_incomplete_or_ran_nothing_is_no_success(statuses, code):
    with nullcontext() if code == 0 else pytest.raises(typer.Exit, check=lambda ended: ended.exit_code == code):
        exit_if_failed(statuses, FAILURES.split(","))
    if not statuses.get("missing"):
        exit_if_failed(statuses, [])
