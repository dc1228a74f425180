"""A rank that never stops printing: `python chatty.py <trial folder> ...`. The last trial hangs."""

import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from records import record_of

from sp_bench import handover, worker
from sp_bench.driver import launch

LINE = b"x" * 2**16 + b"\n"
FIRST_LOG = os.dup(1)  # where a process that the rank started in its first trial still writes
printed_bytes = 0


def print_without_end() -> None:
    global printed_bytes
    while True:
        for descriptor in (1, FIRST_LOG):
            os.write(descriptor, LINE)
        printed_bytes += len(LINE)
        time.sleep(0.001)


def log_more_than_may_stay(folder: Path) -> None:
    worker._log_to(handover.log_path(folder, 0))
    start = printed_bytes
    while printed_bytes - start < 2 * launch.MAX_LOG_BYTES:  # however long a loaded machine takes over it
        time.sleep(0.01)


threading.Thread(target=print_without_end, daemon=True).start()
*others, last = (Path(argument) for argument in sys.argv[1:])
for folder in others:
    log_more_than_may_stay(folder)
    handover.write_record(folder, record_of(handover.read_trial(folder / handover.TRIAL)[0]))
    handover.enter_phase(folder, 0, "done")
log_more_than_may_stay(last)
handover.enter_phase(last, 0, "correctness")
time.sleep(600)
