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
from sp_bench.config.parsing import ConfigError
from sp_bench.driver import devices, verdict, watched_time
from sp_bench.driver import launch as launching
from sp_bench.driver import ranks as ranks_of
from sp_bench.driver.verdict import Exit
from sp_bench.planning import plan
from sp_bench.planning.settings import DeadlinesConfig

STAND_IN = Path(__file__).parent / "stand_in.py"
LONG = DeadlinesConfig(60, 60, 60, 60)
NEVER = DeadlinesConfig(10_000, 10_000, 10_000, 10_000)  # what a test waits for ends otherwise, or the test hangs


@pytest.fixture
def launch(make_config, tmp_path):
    """Run a trial of two ranks with the stand-in for the worker; its result and folder."""

    def run(behaviour, deadlines=LONG):
        folder, phases = tmp_path / "trial", []
        command = [sys.executable, str(STAND_IN), behaviour, str(folder)]
        [result] = launching.launch([(make_config(), folder)], deadlines, phases.append, command)
        return result, folder, phases

    return run


def is_running(folder):
    pid = int((folder / "sleeper.pid").read_text())
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_record_and_exit_code_0_is_ok(launch):
    result, _, phases = launch("ok")
    assert result.status == "ok"
    assert result.measured["median_step_ms"] == 1.5
    assert result.phase == "done"
    assert result.duration_s > 0
    assert result.started_at.tzinfo is not None
    assert list(result.phase_s) == ["imports", *handover.PHASES]
    assert sum(result.phase_s.values()) == pytest.approx(result.duration_s, abs=0.05)
    assert "done" in phases


def test_the_ranks_read_the_config_that_was_planned(launch, make_config):
    _, folder, _ = launch("ok")
    assert handover.read_trial(folder / handover.TRIAL) == (make_config(), 0)


def test_the_first_failure_by_time_wins_over_its_peers(launch):
    result, _, _ = launch("failed")
    assert (result.status, result.reason) == ("incorrect", "dq is 3.0e-2 off")
    assert result.phase == "correctness"


def test_out_of_memory_names_its_site(launch):
    result, _, _ = launch("oom")
    assert (result.status, result.oom_site) == ("oom", "torch")
    assert "2 GiB" in result.reason


def test_a_hang_is_a_timeout_that_names_phase_seconds_and_the_rank_behind_and_leaves_no_process(launch):
    result, folder, _ = launch("hang", DeadlinesConfig(60, 60, 0.5, 60))
    assert result.status == "timeout"
    assert result.reason == "phase warmup passed its deadline of 0.5 s in rank 1"
    assert result.phase == "measure"
    assert not is_running(folder)


def test_peers_that_hang_after_a_failure_are_ended_and_the_failure_is_the_status(launch, monkeypatch):
    monkeypatch.setattr(launching, "FAILURE_GRACE_S", 0.8)
    result, folder, _ = launch("failed_and_peers_hang", NEVER)
    assert (result.status, result.oom_site) == ("oom", "torch")
    assert not is_running(folder)


def test_what_outlives_a_normal_exit_is_ended_too(launch):
    result, folder, _ = launch("ok_with_sleeper")
    assert result.status == "ok"
    assert not is_running(folder)


def test_an_exit_without_a_record_is_an_error(launch):
    result, _, _ = launch("no_record")
    assert result.status == "error"
    assert "left no record" in result.reason


def test_a_record_does_not_hide_a_rank_that_failed_after_it(launch):
    result, _, _ = launch("record_but_failed")
    assert result.status == "error"
    assert "rank 1 exited with code 7" in result.reason


def test_a_rank_killed_outright_is_the_cause_and_not_its_peers_lost_connection(launch):
    result, _, _ = launch("peer_of_a_killed_rank")
    assert (result.status, result.reason) == ("error", "rank 1 died with SIGSEGV in phase measure")


def test_a_silent_exit_is_told_by_the_ranks_last_line(launch):
    result, _, _ = launch("import_error")
    assert result.status == "error"
    assert result.reason == ("rank 1 exited with code 1 in phase init: ModuleNotFoundError: No module named 'torch'")


def test_logs_stay_bounded_and_keep_their_ends(launch):
    result, folder, _ = launch("chatty")
    assert result.status == "ok"
    assert (folder / "rank0.log").stat().st_size <= launching.MAX_LOG_BYTES
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
            launching.launch(
                [(make_config(), folder)], LONG, interrupt, [sys.executable, str(STAND_IN), "hang", str(folder)]
            )
        )
    assert not is_running(folder)


def test_a_rank_that_segfaults_is_named_with_its_signal_and_its_peers_are_ended(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "FAILURE_GRACE_S", 10_000.0)  # they are asked to end before it has passed
    script = (
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "time.sleep(10_000)\n"
    )
    command = [sys.executable, "-c", script]
    [result] = launching.launch([(make_config(), tmp_path / "trial")], NEVER, lambda phase: None, command)
    assert (result.status, result.reason) == ("error", "rank 1 died with SIGSEGV in phase init")


def test_each_rank_is_told_who_it_is_and_only_rank_0_has_the_socket_where_they_meet(make_config, tmp_path):
    script = (
        "import json, os, socket\n"
        "names = 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'\n"
        "said = {name: os.environ[name] for name in names}\n"
        f"if (fd := os.environ.get({handover.LISTEN_FD!r})):\n"
        "    said['port'] = socket.socket(fileno=int(fd)).getsockname()[1]\n"
        "print(json.dumps(said))\n"
    )
    command, folder = [sys.executable, "-c", script], tmp_path / "trial"
    list(launching.launch([(make_config(), folder)], LONG, lambda phase: None, command))
    first, second = (json.loads(handover.log_path(folder, rank).read_text()) for rank in range(2))
    port = first.pop("port")
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert first == {"RANK": "0", "LOCAL_RANK": "0", **shared}
    assert second == {"RANK": "1", "LOCAL_RANK": "1", **shared}


def test_what_libraries_compile_stays_in_the_campaigns_folder_unless_a_user_has_another(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    trial = tmp_path / "campaign" / "_work" / "trials" / "key.nonce"
    caches = ranks_of.compiler_caches(handover.compiled(trial))
    torch_s = Path(caches["TORCHINDUCTOR_CACHE_DIR"])
    assert torch_s.parents[1] == tmp_path / "campaign" / "_work" / "compiled"
    assert torch_s.parent.stat().st_mode & 0o077 == 0
    assert caches["TRITON_CACHE_DIR"] == "/elsewhere"
    monkeypatch.setattr(ranks_of.hardware, "cpu_model", lambda: "another CPU")
    assert Path(ranks_of.compiler_caches(handover.compiled(trial))["TORCHINDUCTOR_CACHE_DIR"]) != torch_s


@pytest.mark.parametrize("elsewhere", [None, "/elsewhere"])
@pytest.mark.parametrize("forbidden", ["", "1"])
def test_python_keeps_bytecode_in_the_campaigns_folder_where_it_may_not_beside_the_sources(
    tmp_path, monkeypatch, forbidden, elsewhere
):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", forbidden)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    if elsewhere:
        monkeypatch.setenv("PYTHONPYCACHEPREFIX", elsewhere)
    variables = dict(os.environ) | ranks_of.compiler_caches(tmp_path)
    (tmp_path / "mine.py").write_text("")
    subprocess.run([sys.executable, "-c", "import mine"], cwd=tmp_path, env=variables, check=True)
    kept = [path.relative_to(tmp_path).parts[1] for path in tmp_path.glob("*-*/python/**/mine.*.pyc")]
    assert kept == (["python"] if forbidden and not elsewhere else [])


@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL, -signal.SIGSEGV])
def test_every_exit_is_known_with_its_code_and_its_time(make_config, tmp_path, code):
    """Of the first while the second still runs, which ends when it is told to."""
    wait = "while os.environ['RANK'] == '1' and not os.path.exists('go'): time.sleep(0.02)"
    script = f"import os, time; from sp_bench import handover\n{wait}\nprint(handover.now())\n{_end(code)}"
    ranks = ranks_of.Ranks()
    ranks.start([sys.executable, "-uc", script], make_config(), tmp_path, devices.new_token())
    deadline = time.monotonic() + 60
    while not ranks.exits:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    told_at = handover.now()
    (tmp_path / "go").touch()
    ranks.join()
    assert [(each.rank, each.code) for each in ranks.exits] == [(0, code), (1, code)]
    last_words = [float(handover.log_path(tmp_path, rank).read_text()) for rank in range(2)]
    assert last_words[0] < ranks.exits[0].at <= told_at < last_words[1] < ranks.exits[1].at


def _end(code: int) -> str:
    return f"os._exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})"


def test_the_fabrics_variables_and_the_threads_reach_the_ranks_whatever_the_shell_says(make_config, monkeypatch):
    for name, value in (("GLOO_SOCKET_IFNAME", "eth0"), ("OMP_NUM_THREADS", "7"), ("OF_THE_SHELL", "kept")):
        monkeypatch.setenv(name, value)
    config = make_config(fabric__env={"GLOO_SOCKET_IFNAME": "lo"}, hardware__threads_per_rank=3)
    variables = ranks_of.environment(config)
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["OF_THE_SHELL"] == "kept"


def test_a_rank_has_one_thread_unless_somebody_says_otherwise_or_it_is_alone(make_config, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    of_two = make_config(hardware__threads_per_rank=None)
    alone = make_config(method="single", sp_size=1, hardware__threads_per_rank=None)
    assert ranks_of.environment(of_two)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in ranks_of.environment(alone)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert ranks_of.environment(of_two)["OMP_NUM_THREADS"] == "7"


def test_expandable_segments_are_added_to_what_the_shell_says_and_need_processes_of_their_own(make_config, monkeypatch):
    gpu = {"hardware": "h200", "fabric": "nvlink", "isolation": "group"}
    plain, expandable = make_config(**gpu), make_config(**gpu, hardware__allocator="expandable_segments")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_of.environment(expandable)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    variables = ranks_of.environment(expandable)
    assert variables["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:512,expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in variables
    assert "PYTORCH_ALLOC_CONF" not in ranks_of.environment(plain)
    assert plan.process_key(plain) != plan.process_key(expandable)
    assert plan.cell_id(plain) != plan.cell_id(expandable)
    with pytest.raises(ConfigError, match="is of torch's allocator on CUDA; leave it out"):
        make_config(hardware__allocator="expandable_segments")


def clock(world_size=2, **seconds):
    return launching.PhaseClock(
        world_size, DeadlinesConfig(**{"init": 10, "correctness": 10, "warmup": 10, "measure": 10} | seconds)
    )


def event(rank, at, name):
    return handover.Event(rank, at, name)


def test_init_is_timed_from_the_launch_whenever_its_events_come():
    watch = clock()
    assert watch.expired([], [], 0) is None
    assert watch.expired([], [], 5) is None
    assert watch.expired([event(0, 1009, "init")], [], 9) is None
    assert "init passed its deadline of 10 s in ranks 0, 1" in str(watch.expired([event(0, 1009, "init")], [], 10.5))


def test_a_phase_is_timed_from_when_the_last_rank_entered_it():
    watch = clock()
    both = [event(0, 1, "correctness"), event(1, 8, "correctness")]
    assert watch.expired([event(0, 1, "correctness")], [], 1) is None
    assert watch.expired(both, [], 8) is None
    assert watch.phase == "correctness"
    assert [watch.expired(both, [], now) for now in (13, 17.9)] == [None, None]
    assert "ranks 0, 1" in str(watch.expired(both, [], 18.1))


def test_a_driver_that_was_stopped_reads_what_its_ranks_wrote_before_it_calls_them_late():
    watch = clock(world_size=1)
    assert watch.expired([event(0, 1, "correctness")], [], 1) is None
    assert watch.expired([event(0, 1, "correctness"), event(0, 20, "measure")], [], 3601) is None
    assert watch.phase == "measure"


@pytest.fixture
def watched(monkeypatch):
    """A WatchedTime without its thread, and a clock that is set by hand."""
    monkeypatch.setattr(watched_time.time, "monotonic", lambda: at[0])
    at = [100.0]
    return watched_time.WatchedTime(), at


def test_time_in_which_the_driver_was_stopped_is_not_watched(watched):
    time_of, at = watched
    for _ in range(2):  # whether the thread beats first, or the driver asks first
        before = time_of.now()
        at[0] += 3600
        assert time_of.now() - before <= watched_time.BEAT_S + 1e-6
        at[0] += 3600
        time_of.beat(at[0])
        assert time_of.now() - before <= 2 * watched_time.BEAT_S + 1e-6


def test_polls_that_each_take_long_are_watched_as_the_process_runs(watched):
    time_of, at = watched
    before = time_of.now()
    for _ in range(5):
        for _ in range(100):  # a read from a slow folder, of 10 s
            at[0] += 0.1
            time_of.beat(at[0])
        found = time_of.now() - before
    assert found == pytest.approx(50.0)


def test_a_process_that_is_stopped_does_not_see_the_time_pass_and_one_that_waits_does():
    script = (
        "import sys, time\n"
        "from sp_bench.driver.watched_time import WatchedTime\n"
        "with WatchedTime() as watched:\n"
        "    begin, begun = time.monotonic(), watched.now()\n"
        "    print('begun', flush=True)\n"
        "    sys.stdin.readline()\n"  # a read that takes long
        "    print(time.monotonic() - begin, watched.now() - begun)\n"
    )
    for stopped in (False, True):
        process = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True)
        assert process.stdout.readline() == "begun\n"
        if stopped:
            process.send_signal(signal.SIGSTOP)
        time.sleep(6)
        process.send_signal(signal.SIGCONT)
        passed, seen = map(float, process.communicate("go on\n")[0].split())
        assert passed >= 6
        assert (seen < passed - 4) == stopped


def test_the_ledger_has_the_deadline_of_measure():
    watch = clock(world_size=1, measure=3)
    assert watch.expired([event(0, 1, "ledger")], [], 1) is None
    assert "ledger passed its deadline of 3 s in rank 0" in str(watch.expired([event(0, 1, "ledger")], [], 4.5))


@pytest.mark.parametrize(("oom_killed", "status", "site"), [(True, "oom", "host"), (False, "error", None)])
def test_a_sigkill_is_host_memory_only_if_the_kernel_counted_one(tmp_path, oom_killed, status, site):
    ending = verdict.Ending([Exit(1, -signal.SIGKILL, 1.0)], None, oom_killed)
    outcome = verdict.classify(tmp_path, ending)
    assert (outcome.status, outcome.oom_site) == (status, site)
    assert "rank 1 died with SIGKILL" in str(outcome.reason)


def ended(folder, *what_ended, expired=None, ended_at=math.inf):
    """The verdict on a trial of two ranks: each an Exit, or (rank, at, what it said of its failure)."""
    for rank in (0, 1):
        handover.send_event(folder, handover.Event(rank, 1.0, "measure"))
    for rank, at, (status, reason) in (each for each in what_ended if isinstance(each, tuple)):
        handover.send_event(folder, handover.Event(rank, at, "failed", status, f"rank {rank}: {reason}"))
    exits = [each for each in what_ended if isinstance(each, Exit)]
    outcome = verdict.classify(folder, verdict.Ending(exits, expired, False, ended_at))
    assert outcome.phase == "measure"
    return outcome.status, outcome.reason


ECHO = ("error", "RuntimeError: Connection closed by peer [127.0.0.1]:4711")


def test_what_a_rank_reports_is_the_cause_and_not_the_echo_that_its_peer_stamped_before(tmp_path):
    wrong = ("incorrect", "the loss changes by 0.1")
    assert ended(tmp_path, (0, 2.0, ECHO), (1, 2.1, wrong)) == ("incorrect", f"rank 1: {wrong[1]}")


def test_a_rank_that_leaves_with_code_0_is_the_cause_and_not_its_peers_lost_connection(tmp_path):
    handover.log_path(tmp_path, 1).write_text("exit() was called\n")
    found = ended(tmp_path, Exit(1, 0, 2.0), (0, 2.1, ECHO), Exit(0, 1, 2.2))
    assert found == ("error", "rank 1 exited with code 0 in phase measure: exit() was called")


def test_a_killed_rank_is_the_cause_even_if_the_echo_has_the_earlier_time(tmp_path):
    found = ended(tmp_path, (0, 2.0, ECHO), Exit(1, -signal.SIGKILL, 2.1), Exit(0, 1, 2.2))
    assert found == ("error", "rank 1 died with SIGKILL in phase measure")


def test_what_a_rank_told_first_is_the_cause_and_not_the_crash_of_its_peer(tmp_path):
    oom = ("oom", "OutOfMemoryError: 2 GiB")
    found = ended(tmp_path, (0, 2.0, oom), Exit(1, -signal.SIGSEGV, 2.1))
    assert found == ("oom", "rank 0: OutOfMemoryError: 2 GiB")


@pytest.mark.parametrize(
    ("at", "reason"), [(1.9, "rank 1 died with SIGABRT in phase measure"), (2.1, "rank 0: " + ECHO[1])]
)
def test_an_abort_is_the_cause_only_if_it_came_first(tmp_path, at, reason):
    assert ended(tmp_path, (0, 2.0, ECHO), Exit(1, -signal.SIGABRT, at)) == ("error", reason)


def test_ranks_that_the_driver_ended_are_not_the_cause(tmp_path):
    told = ("error", "ValueError: first")
    assert ended(tmp_path, (1, 2.0, told), Exit(0, -signal.SIGTERM, 1.9)) == ("error", "rank 1: ValueError: first")


def test_a_rank_that_somebody_else_ended_is_named(tmp_path):
    found = ended(tmp_path, Exit(1, -signal.SIGTERM, 2.0), Exit(0, -signal.SIGTERM, 2.5))
    assert found == ("error", "rank 1 died with SIGTERM in phase measure")


def test_ranks_that_were_killed_for_a_deadline_are_a_timeout(tmp_path):
    late = [Exit(rank, -signal.SIGKILL, 5.0 + rank) for rank in (0, 1)]
    found = ended(tmp_path, *late, expired="phase measure passed its deadline", ended_at=4.9)
    assert found == ("timeout", "phase measure passed its deadline")


def test_a_killed_rank_whose_peers_hang_is_an_error_and_no_timeout(tmp_path):
    expired = "the other ranks did not end within 10 s of the first failure"
    found = ended(tmp_path, Exit(1, -signal.SIGKILL, 2.0), expired=expired, ended_at=12.0)
    assert found == ("error", "rank 1 died with SIGKILL in phase measure")


def test_a_rank_that_left_before_it_was_done_starts_the_clock_of_its_peers():
    watch, began, left = clock(), [event(1, 5, "init")], [Exit(1, 0, 6.0)]
    assert [watch.expired(began, left, now) for now in (6, 11, 15)] == [None] * 3
    expired = watch.expired(began, left, 6.1 + launching.FAILURE_GRACE_S)
    assert "did not end within 10 s of the first failure" in str(expired)
    assert clock().expired([event(0, 6, "done")], [Exit(0, 0, 7.0)], 9) is None


def test_a_rank_that_crashed_after_it_was_done_starts_the_clock_of_its_peers():
    watch = clock()
    watch.expired([event(0, 6, "done")], [Exit(0, -signal.SIGSEGV, 7.0)], 9)
    assert watch.failed_since == 9


def test_processes_that_end_after_an_ok_trial_end_the_group_without_a_word_on_the_next(make_config, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    command = [sys.executable, str(STAND_IN), "ok", str(folders[0])]
    results = list(launching.launch([(make_config(), folder) for folder in folders], LONG, lambda phase: None, command))
    assert [result.status for result in results] == ["ok"]


def test_what_a_killed_rank_0_was_writing_is_removed(launch):
    _, folder, _ = launch("killed_while_writing")
    assert sorted(path.name for path in folder.iterdir()) == [
        *("rank0.events.jsonl", "rank0.log", "rank1.events.jsonl", "rank1.log", handover.TRIAL)
    ]


def test_an_event_that_is_still_being_written_is_left_for_later(tmp_path):
    handover.enter_phase(tmp_path, 0, "init")
    with open(tmp_path / "rank0.events.jsonl", "a") as file:
        file.write(json.dumps({"rank": 0, "at": 2.0, "name": "correc"})[:-3])
    assert [e.name for e in handover.read_events(tmp_path)] == ["init"]


def test_kill_all_spares_processes_without_the_token():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    victim = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, devices.TOKEN: "test-token"}
    )
    try:
        deadline = time.monotonic() + 10
        while psutil.Process(victim.pid).environ().get(devices.TOKEN) != "test-token":
            assert time.monotonic() < deadline
        devices.kill_all("test-token")
        assert victim.wait(timeout=1) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_kill_all_does_not_wait_for_those_who_never_ask_how_a_process_ended():
    """As the first process of many containers, which gets the compilers that a rank has started."""
    careless = (
        "import os, subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        f"marked = {{**os.environ, {devices.TOKEN!r}: 'test-token-2'}}\n"
        "child = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, env=marked)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", careless], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        while child.environ().get(devices.TOKEN) is None:
            time.sleep(0.01)
        before = time.monotonic()
        devices.kill_all("test-token-2")
        assert time.monotonic() - before < 0.9
        assert child.status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.communicate()


def test_a_phase_that_is_entered_twice_has_the_seconds_of_both(tmp_path):
    for at, name in (
        (100.4, "init"),
        (101.0, "warmup"),
        (103.0, "measure"),
        (110.0, "warmup"),
        (111.5, "measure"),
        (120.0, "done"),
    ):
        handover.send_event(tmp_path, handover.Event(0, at, name))
    seconds = launching._phase_seconds(tmp_path, 100.0, 21.0)
    expected = {"imports": 0.4, "init": 0.6, "warmup": 3.5, "measure": 15.5, "done": 1.0}
    assert seconds == pytest.approx(expected)
    assert list(seconds) == list(expected)


def test_a_warm_rank_imports_nothing_and_begins_before_it_is_looked_at(tmp_path):
    for at, name in ((99.9, "init"), (100.5, "done")):
        handover.send_event(tmp_path, handover.Event(0, at, name))
    assert launching._phase_seconds(tmp_path, 100.0, 1.0) == {"imports": 0.0, "init": 0.5, "done": 0.5}


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_step_of_the_machines_clock_moves_no_event_of_a_rank(step_s):
    stepped = f"import time; wall = time.time; time.time = lambda: wall() + {step_s}"
    script = f"{stepped}\nfrom sp_bench import handover; print(handover.now())"
    before = handover.now()
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | handover.clock(), capture_output=True, text=True, check=True
    )
    assert before < float(done.stdout) < handover.now()
