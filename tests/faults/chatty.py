"""A rank that never stops printing: `python chatty.py <trial folder> ...`. The last trial hangs. Imports no torch."""

import os
import sys
import threading
import time
from pathlib import Path

from sp_bench import handover, worker

LINE = b"x" * 2**16 + b"\n"
LAUNCHER = os.dup(1)  # what the rank printed before it had a log of its own goes there


def print_without_end() -> None:
    while True:
        for descriptor in (1, LAUNCHER):
            os.write(descriptor, LINE)
        time.sleep(0.001)


threading.Thread(target=print_without_end, daemon=True).start()
*others, last = (Path(argument) for argument in sys.argv[1:])
for folder in others:
    worker._log_to(handover.log_path(folder, 0))
    time.sleep(0.5)
    handover.write_record(folder, {})
    handover.enter_phase(folder, 0, "done")
worker._log_to(handover.log_path(last, 0))
handover.enter_phase(last, 0, "correctness")
time.sleep(600)
