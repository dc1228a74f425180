"""`python fill.py <campaign> <processes> <rows>`: all try to commit all rows; prints what was committed."""

import json
import os
import sys
from pathlib import Path

import pandas  # noqa: F401 - pyarrow imports it at the first row: once, here, and not in each process

from sp_bench.driver import claims
from sp_bench.rows import store

campaign, num_processes, num_rows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def fill(told: int) -> None:
    left = {f"{number:012x}" for number in range(num_rows)}
    with claims.Claims(campaign / store.WORK / claims.FOLDER) as mine:
        while left:
            for trial_id in sorted(left, key=lambda trial_id: hash((trial_id, os.getpid()))):
                identity = (trial_id, "01234567", 0)
                if store.is_committed(campaign, *identity):
                    left.remove(trial_id)
                elif claim := mine.take(f"{trial_id}-01234567-0", lambda i=identity: store.is_committed(campaign, *i)):
                    row = {"status": "ok", "trial_id": trial_id, "env_id": "01234567", "attempt": 0}
                    mine.commit(claim, row, campaign)
                    mine.release(claim)
                    os.write(told, f"{trial_id}\n".encode())


reading, writing = os.pipe()
pids = []
for _ in range(num_processes):
    if not (pid := os.fork()):
        fill(writing)
        os._exit(0)
    pids.append(pid)
os.close(writing)
with open(reading) as lines:
    committed = lines.read().split()
assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
print(json.dumps(committed))
