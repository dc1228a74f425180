"""Stages of one training: the length of its sequences changes while one process trains one model with one optimizer.

Each step of each stage is compared with the same training on one process, as in `parity`. All steps are timed, the
first of a stage too: what it takes to change the length, to compile anew and to find memory is in its time.
"""

import itertools

from sp_bench.measure.record import of_all_ranks
from sp_bench.measure.timing import Measurement
from sp_bench.workloads import Job, parity


def run(job: Job) -> Measurement:
    stages = job.config.stages
    measurement, marks = parity.trained(job, [seq_len for seq_len, steps in stages for _ in range(steps)])
    ends = [*itertools.accumulate((steps for _, steps in stages), initial=0)]
    found = []
    for (seq_len, steps), start, end in zip(stages, ends, ends[1:], strict=False):
        before, after = marks[1 + start], marks[1 + end]  # the first mark is that before the engine starts
        reserved = [each for each in of_all_ranks(after.reserved_bytes) if each is not None]
        found.append(
            {
                "seq_len": seq_len,
                "num_steps": steps,
                "reserved_bytes": max(reserved, default=None),
                "compiled": after.compiled - before.compiled,
                "compile_s": after.compile_s - before.compile_s,
            }
        )
    measurement.columns["stage_ends"] = found
    return measurement
