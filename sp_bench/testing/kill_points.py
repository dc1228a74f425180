"""Where a test can kill this process as kill -9 would: at a step of the claim and write protocol, by a variable."""

import os
import signal

VARIABLE = "SP_BENCH_FAIL_POINT"
STEPS = (
    *("claim_made", "claim_held", "trial_launched", "trial_ended"),
    *("row_written", "row_synced", "row_replaced", "row_committed", "claim_released", "claim_taken_over"),
)
PACKING = ("pack_written", "pack_replaced", "pack_unlinked")


def reach(step: str) -> None:
    assert step in (*STEPS, *PACKING)
    if os.environ.get(VARIABLE) == step:
        os.kill(os.getpid(), signal.SIGKILL)
