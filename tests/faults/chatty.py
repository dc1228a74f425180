"""A rank that never stops printing: `python chatty.py <trial folder> ...`. The last trial hangs. Imports no torch."""

import os
import sys
import threading
import time
from pathlib import Path

from sp_bench import handover, worker
from sp_bench.driver import logs

LINE = b"x" * 2**16 + b"\n"
LAUNCHER = os.dup(1)  # what the rank printed before it had a log of its own goes there
printed_bytes = 0


def print_without_end() -> None:
    global printed_bytes
    while True:
        for descriptor in (1, LAUNCHER):
            os.write(descriptor, LINE)
        printed_bytes += len(LINE)
        time.sleep(0.001)


def log_more_than_may_stay(folder: Path) -> None:
    worker._log_to(handover.log_path(folder, 0))
    start = printed_bytes
    while printed_bytes - start < 2 * logs.MAX_BYTES:  # however long a loaded machine takes over it
        time.sleep(0.01)


threading.Thread(target=print_without_end, daemon=True).start()
*others, last = (Path(argument) for argument in sys.argv[1:])
for folder in others:
    log_more_than_may_stay(folder)
    handover.write_record(folder, {})
    handover.enter_phase(folder, 0, "done")
log_more_than_may_stay(last)
handover.enter_phase(last, 0, "correctness")
time.sleep(600)
