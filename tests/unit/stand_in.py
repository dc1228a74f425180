"""Stands in for a trial's ranks: `python stand_in.py <behaviour> <trial folder>`. Imports no torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sp_bench import handover

behaviour, folder = sys.argv[1], Path(sys.argv[2])


def enter(*phases: str, ranks: tuple[int, ...] = (0, 1)) -> None:
    for phase in phases:
        for rank in ranks:
            handover.enter_phase(folder, rank, phase)


def fail(rank: int, status: str, reason: str, site: str | None = None) -> None:
    handover.send_event(folder, handover.Event(rank, time.time(), "failed", status, reason, site))


def leave_sleeper() -> None:
    """As torchrun does with a rank: in a session of its own, which killing a process group does not reach."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / "sleeper.pid").write_text(str(sleeper.pid))


def die_as_torchrun_tells(exit_code: int) -> None:
    print(f"Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : {exit_code} ")
    sys.exit(1)


enter("init")
if behaviour == "ok":
    enter("correctness", "warmup", "measure", "ledger", "handover", "done")
    handover.write_record(folder, {"median_step_ms": 1.5})
elif behaviour == "ok_with_sleeper":
    leave_sleeper()
    enter("done")
    handover.write_record(folder, {})
elif behaviour == "no_record":
    enter("measure")
elif behaviour == "record_but_failed":
    handover.write_record(folder, {})
    die_as_torchrun_tells(7)
elif behaviour == "failed":
    enter("correctness")
    fail(1, "incorrect", "dq is 3.0e-2 off")
    fail(0, "error", "rank 0: RuntimeError: Connection closed by peer")
    sys.exit(1)
elif behaviour == "oom":
    fail(1, "oom", "rank 1: OutOfMemoryError: tried to allocate 2 GiB", "torch")
    sys.exit(1)
elif behaviour == "failed_and_peers_hang":
    fail(1, "oom", "rank 1: out of memory", "torch")
    leave_sleeper()
    time.sleep(600)
elif behaviour == "hang":
    enter("correctness", "warmup", ranks=(0, 1))
    enter("measure", ranks=(0,))
    leave_sleeper()
    time.sleep(600)
elif behaviour == "peer_of_a_killed_rank":
    enter("measure")
    fail(0, "error", "rank 0: RuntimeError: Connection closed by peer")
    die_as_torchrun_tells(-signal.SIGSEGV)
elif behaviour == "import_error":
    handover.log_path(folder, 1).write_text("Traceback\nModuleNotFoundError: No module named 'torch'\n")
    die_as_torchrun_tells(1)
elif behaviour == "launcher_killed":
    enter("warmup")
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "killed_while_writing":
    enter("measure")
    (folder / handover.RECORD_TEMPORARY).write_text('{"step_m')
    (folder / "torchrun").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "chatty":
    with open(handover.log_path(folder, 0), "ab") as log:
        for _ in range(24):
            log.write(b"x" * 2**20 + b"\n")
            print("y" * 2**20)
            time.sleep(0.02)
        log.write(b"the end\n")
    enter("done")
    handover.write_record(folder, {})
