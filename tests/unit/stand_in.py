"""Stands in for one rank of two: `python stand_in.py <behaviour> <trial folder>`. Imports no torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sp_bench import handover

behaviour, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])


def enter(*phases: str) -> None:
    for phase in phases:
        handover.enter_phase(folder, rank, phase)


def fail(status: str, reason: str, site: str | None = None) -> None:
    handover.send_event(folder, handover.Event(rank, handover.now(), "failed", status, reason, site))


def leave_sleeper() -> None:
    """A process in a session of its own, which killing a process group does not reach."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / "sleeper.pid").write_text(str(sleeper.pid))


def wait_for_peer(name: str) -> None:
    """Until the other rank has entered the phase `name`, or has `failed`."""
    while not any(event.rank != rank and event.name == name for event in handover.read_events(folder)):
        time.sleep(0.01)


def die_of(signal_number: int) -> None:
    os.kill(os.getpid(), signal_number)


def record() -> None:
    if rank == 0:
        from records import record_of  # takes a while to import, in which the other behaviours would end

        handover.write_record(folder, record_of(handover.read_trial(folder / handover.TRIAL)[0]))


enter("init")
if behaviour == "ok":
    enter("correctness", "warmup", "measure", "ledger", "handover")
    record()
    enter("done")
elif behaviour == "ok_with_sleeper":
    if rank == 0:
        leave_sleeper()
    record()
    enter("done")
elif behaviour == "no_record":
    enter("measure", "done")
elif behaviour == "record_but_failed":
    record()
    enter("done")
    sys.exit(7 * rank)
elif behaviour == "failed":
    enter("correctness")
    if rank == 1:
        fail("incorrect", "dq is 3.0e-2 off")
    else:
        wait_for_peer("failed")
        fail("error", "rank 0: RuntimeError: Connection closed by peer")
    sys.exit(1)
elif behaviour == "oom":
    if rank == 0:
        time.sleep(600)
    fail("oom", "rank 1: OutOfMemoryError: tried to allocate 2 GiB", "torch")
    sys.exit(1)
elif behaviour == "failed_and_peers_hang":
    if rank == 1:
        wait_for_peer("measure")
        fail("oom", "rank 1: out of memory", "torch")
        sys.exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leave_sleeper()
    enter("measure")
    time.sleep(600)
elif behaviour == "hang":
    enter("correctness", "warmup")
    if rank == 0:
        wait_for_peer("warmup")
        enter("measure")
        leave_sleeper()
    time.sleep(600)
elif behaviour == "peer_of_a_killed_rank":
    enter("measure")
    if rank == 1:
        wait_for_peer("failed")  # the echo comes first
        die_of(signal.SIGSEGV)
    fail("error", "rank 0: RuntimeError: Connection closed by peer")
    sys.exit(1)
elif behaviour == "import_error":
    if rank == 1:
        sys.exit("Traceback\nModuleNotFoundError: No module named 'torch'\n")
    time.sleep(600)
elif behaviour == "killed_while_writing":
    enter("measure")
    if rank == 0:
        (folder / handover.RECORD_TEMPORARY).write_text('{"step_m')
        die_of(signal.SIGKILL)
elif behaviour == "chatty":
    for _ in range(24 * (rank == 0)):
        print("x" * 2**20, flush=True)
        time.sleep(0.02)
    print("the end")
    record()
    enter("done")
