import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sp_bench import handover
from sp_bench.driver import launcher, logs
from sp_bench.driver import verdict as verdicts
from sp_bench.driver.settings import DeadlinesConfig

STAND_IN = Path(__file__).parent / "stand_in.py"
LONG = DeadlinesConfig(60, 60, 60, 60)


@pytest.fixture
def launch(make_config, tmp_path):
    """Run a trial of two ranks with the stand-in for torchrun; its result and folder."""

    def run(behaviour, deadlines=LONG):
        folder, phases = tmp_path / "trial", []
        command = [sys.executable, str(STAND_IN), behaviour, str(folder)]
        [result] = launcher.run([(make_config(), folder)], deadlines, phases.append, command)
        return result, folder, phases

    return run


def is_running(folder):
    pid = int((folder / "sleeper.pid").read_text())
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_record_and_exit_code_0_is_ok(launch):
    result, _, phases = launch("ok")
    assert result.status == "ok"
    assert result.columns["median_step_ms"] == 1.5
    assert result.columns["phase"] == "done"
    assert result.columns["duration_s"] > 0
    assert result.columns["started_at"].tzinfo is not None
    assert list(result.columns["phase_s"]) == list(handover.PHASES)
    assert sum(result.columns["phase_s"].values()) == pytest.approx(result.columns["duration_s"], abs=0.05)
    assert "done" in phases


def test_the_ranks_read_the_config_that_was_planned(launch, make_config):
    _, folder, _ = launch("ok")
    assert handover.read_trial(folder / handover.TRIAL) == make_config()


def test_the_first_failure_by_time_wins_over_its_peers(launch):
    result, _, _ = launch("failed")
    assert (result.status, result.columns["reason"]) == ("incorrect", "dq is 3.0e-2 off")
    assert result.columns["phase"] == "correctness"


def test_out_of_memory_names_its_site(launch):
    result, _, _ = launch("oom")
    assert (result.status, result.columns["oom_site"]) == ("oom", "torch")
    assert "2 GiB" in result.columns["reason"]


def test_a_hang_is_a_timeout_that_names_phase_seconds_and_the_rank_behind_and_leaves_no_process(launch):
    result, folder, _ = launch("hang", DeadlinesConfig(60, 60, 0.5, 60))
    assert result.status == "timeout"
    assert result.columns["reason"] == "phase warmup passed its deadline of 0.5 s in rank 1"
    assert result.columns["phase"] == "measure"
    assert not is_running(folder)


def test_peers_that_hang_after_a_failure_are_ended_and_the_failure_is_the_status(launch, monkeypatch):
    monkeypatch.setattr(launcher, "FAILURE_GRACE_S", 0.3)
    result, folder, _ = launch("failed_and_peers_hang")
    assert (result.status, result.columns["oom_site"]) == ("oom", "torch")
    assert result.columns["duration_s"] < 30
    assert not is_running(folder)


def test_what_outlives_a_normal_exit_is_ended_too(launch):
    result, folder, _ = launch("ok_with_sleeper")
    assert result.status == "ok"
    assert not is_running(folder)


def test_an_exit_without_a_record_is_an_error(launch):
    result, _, _ = launch("no_record")
    assert result.status == "error"
    assert "left no record" in result.columns["reason"]


def test_a_record_does_not_hide_a_rank_that_failed_after_it(launch):
    result, _, _ = launch("record_but_failed")
    assert result.status == "error"
    assert "rank 1 exited with code 7" in result.columns["reason"]


def test_a_rank_killed_outright_is_the_cause_and_not_its_peers_lost_connection(launch):
    result, _, _ = launch("peer_of_a_killed_rank")
    assert (result.status, result.columns["reason"]) == ("error", "rank 1 died with SIGSEGV in phase measure")


def test_a_silent_exit_is_told_by_the_ranks_last_line(launch):
    result, _, _ = launch("import_error")
    assert result.status == "error"
    assert result.columns["reason"] == (
        "rank 1 exited with code 1 in phase init: ModuleNotFoundError: No module named 'torch'"
    )


def test_a_killed_launcher_is_an_error_that_names_the_signal(launch):
    result, _, _ = launch("launcher_killed")
    assert result.status == "error"
    assert "the launcher died with SIGKILL in phase warmup" in result.columns["reason"]


def test_logs_stay_bounded_and_keep_their_ends(launch):
    result, folder, _ = launch("chatty")
    assert result.status == "ok"
    for name in ("rank0.log", logs.LAUNCHER_LOG):
        assert (folder / name).stat().st_size <= logs.MAX_BYTES
    text = (folder / "rank0.log").read_bytes()
    assert text.startswith(b"xxx")
    assert b"bytes left out" in text
    assert text.endswith(b"the end\n")


def test_a_repeated_launch_starts_from_an_empty_folder(launch):
    launch("ok")
    result, folder, _ = launch("no_record")
    assert result.status == "error"
    assert not (folder / handover.RECORD).exists()


def test_an_interrupt_ends_the_trials_processes(make_config, tmp_path):
    folder = tmp_path / "trial"

    def interrupt(phase):
        if (folder / "sleeper.pid").exists() and (folder / "sleeper.pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(
            launcher.run(
                [(make_config(), folder)], LONG, interrupt, [sys.executable, str(STAND_IN), "hang", str(folder)]
            )
        )
    assert not is_running(folder)


def test_a_torchrun_rank_that_segfaults_is_named_with_its_signal(make_config, tmp_path):
    folder, script = tmp_path / "trial", tmp_path / "rank.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "time.sleep(600)\n"
    )
    command = [*launcher.torchrun(2, [folder])[:-3], str(script)]
    [result] = launcher.run([(make_config(), folder)], LONG, lambda phase: None, command)
    assert (result.status, result.columns["reason"]) == ("error", "rank 1 died with SIGSEGV in phase init")


def test_the_fabrics_variables_and_the_threads_reach_the_ranks_whatever_the_shell_says(make_config, monkeypatch):
    for name, value in (("GLOO_SOCKET_IFNAME", "eth0"), ("OMP_NUM_THREADS", "7"), ("OF_THE_SHELL", "kept")):
        monkeypatch.setenv(name, value)
    config = make_config(fabric__env={"GLOO_SOCKET_IFNAME": "lo"}, hardware__threads_per_rank=3)
    variables = launcher.environment(config)
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["OF_THE_SHELL"] == "kept"


def test_torchrun_never_restarts_and_meets_at_a_rendezvous_of_its_own(tmp_path):
    first, second = (launcher.torchrun(4, [tmp_path]) for _ in range(2))
    assert "--max-restarts=0" in first
    assert "--nproc-per-node=4" in first
    assert first != second


def clock(world_size=2, **seconds):
    return launcher.PhaseClock(
        world_size, DeadlinesConfig(**{"init": 10, "correctness": 10, "warmup": 10, "measure": 10} | seconds)
    )


def event(rank, at, name):
    return handover.Event(rank, at, name)


def test_init_is_timed_from_the_launch_whenever_its_events_come():
    watch = clock()
    assert watch.expired([], 0) is None
    assert watch.expired([event(0, 1009, "init")], 9) is None
    assert "init passed its deadline of 10 s in ranks 0, 1" in str(watch.expired([event(0, 1009, "init")], 10.5))


def test_a_phase_is_timed_from_when_the_last_rank_entered_it():
    watch = clock()
    both = [event(0, 1, "correctness"), event(1, 8, "correctness")]
    assert watch.expired([event(0, 1, "correctness")], 1) is None
    assert watch.expired(both, 8) is None
    assert watch.phase == "correctness"
    assert watch.expired(both, 17.9) is None
    assert "ranks 0, 1" in str(watch.expired(both, 18.1))


def test_the_ledger_has_the_deadline_of_measure():
    watch = clock(world_size=1, measure=3)
    assert watch.expired([event(0, 1, "ledger")], 1) is None
    assert "ledger passed its deadline of 3 s in rank 0" in str(watch.expired([event(0, 1, "ledger")], 4.5))


def summary(*failures):
    """torchrun's failure summary, as torch 2.13 prints it."""
    lines = ["sp_bench.worker FAILED", "Failures:"]
    for index, (rank, code) in enumerate(failures):
        if index == len(failures) - 1:
            lines.append("Root Cause (first observed failure):")
        lines += [
            f"[{index}]:",
            "  time      : 2026-11-21",
            "  host      : vm",
            f"  rank      : {rank} (local_rank: {rank})",
        ]
        lines += [f"  exitcode  : {code} (pid: 1{rank})", "  error_file: <N/A>", "  traceback : ..."]
    return "\n".join(lines)


def test_the_root_cause_of_torchruns_summary_comes_first(tmp_path):
    (tmp_path / logs.LAUNCHER_LOG).write_text(summary((0, 1), (3, -11)))
    assert verdicts.read_deaths(tmp_path) == [verdicts.Death(3, -11), verdicts.Death(0, 1)]


@pytest.mark.parametrize(("oom_killed", "status", "site"), [(True, "oom", "host"), (False, "error", None)])
def test_a_sigkill_is_host_memory_only_if_the_kernel_counted_one(tmp_path, oom_killed, status, site):
    (tmp_path / logs.LAUNCHER_LOG).write_text(summary((1, -signal.SIGKILL)))
    verdict = verdicts.classify(tmp_path, verdicts.Ending(1, None, oom_killed))
    assert (verdict["status"], verdict.get("oom_site")) == (status, site)
    assert "rank 1 died with SIGKILL" in verdict["reason"]


def test_an_abort_that_follows_a_peers_error_does_not_hide_it(tmp_path):
    (tmp_path / logs.LAUNCHER_LOG).write_text(summary((0, 1), (1, -signal.SIGABRT)))
    handover.send_event(tmp_path, handover.Event(0, 1.0, "failed", "error", "rank 0: ValueError: the cause"))
    assert verdicts.classify(tmp_path, verdicts.Ending(1, None, False))["reason"] == "rank 0: ValueError: the cause"


def ended(folder, *events, exit_code=1, expired=None, ended_at=math.inf):
    """The verdict on a trial of two ranks that told this: (rank, at, exit code, or what it said of its failure)."""
    for rank in (0, 1):
        handover.send_event(folder, handover.Event(rank, 1.0, "measure"))
    for rank, at, what in events:
        told = (
            {"exit_code": what} if isinstance(what, int) else {"status": what[0], "reason": f"rank {rank}: {what[1]}"}
        )
        handover.send_event(folder, handover.Event(rank, at, "exited" if isinstance(what, int) else "failed", **told))
    verdict = verdicts.classify(folder, verdicts.Ending(exit_code, expired, False, ended_at))
    assert verdict["phase"] == "measure"
    return verdict["status"], verdict["reason"]


ECHO = ("error", "RuntimeError: Connection closed by peer [127.0.0.1]:4711")


def test_a_rank_that_leaves_with_code_0_is_the_cause_and_not_its_peers_lost_connection(tmp_path):
    handover.log_path(tmp_path, 1).write_text("exit() was called\n")
    verdict = ended(tmp_path, (1, 2.0, 0), (0, 2.1, ECHO), (0, 2.2, 1))
    assert verdict == ("error", "rank 1 exited with code 0 in phase measure: exit() was called")


def test_a_killed_rank_is_the_cause_even_if_the_echo_has_the_earlier_time(tmp_path):
    verdict = ended(tmp_path, (0, 2.0, ECHO), (1, 2.1, -signal.SIGKILL), (0, 2.2, 1))
    assert verdict == ("error", "rank 1 died with SIGKILL in phase measure")


def test_what_a_rank_told_first_is_the_cause_and_not_the_crash_of_its_peer(tmp_path):
    oom = ("oom", "OutOfMemoryError: 2 GiB")
    assert ended(tmp_path, (0, 2.0, oom), (1, 2.1, -signal.SIGSEGV)) == ("oom", "rank 0: OutOfMemoryError: 2 GiB")


@pytest.mark.parametrize(
    ("at", "reason"), [(1.9, "rank 1 died with SIGABRT in phase measure"), (2.1, "rank 0: " + ECHO[1])]
)
def test_an_abort_is_the_cause_only_if_it_came_first(tmp_path, at, reason):
    assert ended(tmp_path, (0, 2.0, ECHO), (1, at, -signal.SIGABRT)) == ("error", reason)


def test_ranks_that_torchrun_ended_are_not_the_cause(tmp_path):
    told = ("error", "ValueError: first")
    verdict = ended(tmp_path, (1, 2.0, told), (0, 1.9, -signal.SIGTERM))
    assert verdict == ("error", "rank 1: ValueError: first")


def test_ranks_that_were_killed_for_a_deadline_are_a_timeout(tmp_path):
    late = [(rank, 5.0 + rank, -signal.SIGKILL) for rank in (0, 1)]
    verdict = ended(tmp_path, *late, exit_code=None, expired="phase measure passed its deadline", ended_at=4.9)
    assert verdict == ("timeout", "phase measure passed its deadline")


def test_a_killed_rank_whose_peers_hang_is_an_error_and_no_timeout(tmp_path):
    expired = "the other ranks did not end within 10 s of the first failure"
    verdict = ended(tmp_path, (1, 2.0, -signal.SIGKILL), exit_code=None, expired=expired, ended_at=12.0)
    assert verdict == ("error", "rank 1 died with SIGKILL in phase measure")


@pytest.mark.parametrize("exit_code", [0, 3, -signal.SIGKILL, -signal.SIGSEGV])
def test_how_a_rank_ends_is_told_by_its_watcher_which_ends_alike(tmp_path, exit_code):
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom sp_bench import worker\n"
        "code = int(sys.argv[2])\n"
        "worker.main = lambda trials: os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)\n"
        "worker.watch_over([Path(sys.argv[1])])\n"
    )
    (tmp_path / "trial").mkdir()
    arguments = [str(tmp_path / "trial" / handover.TRIAL), str(exit_code)]
    done = subprocess.run([sys.executable, "-c", script, *arguments], env={**os.environ, "RANK": "1"}, cwd=tmp_path)
    assert done.returncode == exit_code
    [event] = handover.read_events(tmp_path / "trial")
    assert (event.rank, event.name, event.exit_code) == (1, "exited", exit_code)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["rank1.events.jsonl", "trial"]


def test_a_rank_that_left_before_it_was_done_starts_the_clock_of_its_peers():
    watch = clock()
    left = [event(1, 5, "init"), handover.Event(1, 6, "exited", exit_code=0)]
    assert watch.expired(left, 6) is None
    assert "did not end within 10 s of the first failure" in str(watch.expired(left, 6.1 + launcher.FAILURE_GRACE_S))
    assert clock().expired([event(0, 6, "done"), handover.Event(0, 7, "exited", exit_code=0)], 9) is None


def test_processes_that_end_after_an_ok_trial_end_the_group_without_a_word_on_the_next(make_config, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    command = [sys.executable, str(STAND_IN), "ok", str(folders[0])]
    results = list(launcher.run([(make_config(), folder) for folder in folders], LONG, lambda phase: None, command))
    assert [result.status for result in results] == ["ok"]


def test_what_a_killed_rank_0_was_writing_is_removed(launch):
    _, folder, _ = launch("killed_while_writing")
    assert sorted(path.name for path in folder.iterdir()) == [
        *(logs.LAUNCHER_LOG, "rank0.events.jsonl", "rank1.events.jsonl", handover.TRIAL)
    ]


def test_an_event_that_is_still_being_written_is_left_for_later(tmp_path):
    handover.enter_phase(tmp_path, 0, "init")
    with open(tmp_path / "rank0.events.jsonl", "a") as file:
        file.write(json.dumps({"rank": 0, "at": 2.0, "name": "correc"})[:-3])
    assert [e.name for e in handover.read_events(tmp_path)] == ["init"]


def test_kill_all_spares_processes_without_the_token():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    victim = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, launcher.TOKEN: "test-token"}
    )
    try:
        deadline = time.monotonic() + 10
        while psutil.Process(victim.pid).environ().get(launcher.TOKEN) != "test-token":
            assert time.monotonic() < deadline
        launcher.kill_all("test-token")
        assert not psutil.pid_exists(victim.pid)
        victim.wait()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_phase_that_is_entered_twice_has_the_seconds_of_both(tmp_path):
    for at, name in ((101.0, "warmup"), (103.0, "measure"), (110.0, "warmup"), (111.5, "measure"), (120.0, "done")):
        handover.send_event(tmp_path, handover.Event(0, at, name))
    seconds = launcher._phase_seconds(tmp_path, 100.0, 21.0)
    assert seconds == {"init": 1.0, "warmup": 3.5, "measure": 15.5, "done": 1.0}
    assert list(seconds) == ["init", "warmup", "measure", "done"]
