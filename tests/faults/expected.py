"""What each cell of the fault matrix must end in: one line a kind; ranks and phases differ in what the reason names.

A slow rank is `ok` and sets the pace: its phase, and in `measure` the step, takes as long as it does. A rank that is
slower than its phase's deadline is a hang, and `timeout`.
"""

import itertools
import re
from dataclasses import dataclass

from sp_bench.testing import faults


@dataclass(frozen=True)
class Expected:
    status: str
    oom_site: str | None
    reason: str | None  # as a regular expression, with fields; None: an ok row has no reason


EXPECTED = {
    "torch_oom": Expected("oom", "torch", "rank {rank}: OutOfMemoryError: CUDA out of memory"),
    "nccl_oom": Expected("oom", "nccl", "rank {rank}: DistBackendError: NCCL error in"),
    "host_oom": Expected("oom", "host", r"rank {rank}: RuntimeError: .*DefaultCPUAllocator"),
    "exception": Expected("error", None, "rank {rank}: RuntimeError: injected exception"),
    "hang": Expected("timeout", None, r"phase {phase} passed its deadline of {deadline:g} s in ranks 0, 1"),
    "segfault": Expected("error", None, "rank {rank} died with SIGSEGV in phase {phase}"),
    "sigkill": Expected("error", None, "rank {rank} died with SIGKILL in phase {phase}"),
    "slow": Expected("ok", None, None),
    "exit": Expected("error", None, "rank {rank} exited with code 0 in phase {phase}"),
}

RANKS = ("0", "1", "all")  # of two


@dataclass(frozen=True)
class Cell:
    kind: str
    ranks: str
    phase: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}-{self.phase}"

    @property
    def variable(self) -> str:
        return f"{self.kind}:{self.ranks}:{self.phase}"

    @property
    def expected(self) -> Expected:
        return EXPECTED[self.kind]

    def explains(self, reason: str | None, deadline_s: float) -> bool:
        """Whether a row's reason is what this cell must say."""
        if self.expected.reason is None or reason is None:
            return reason is self.expected.reason
        rank = "[01]" if self.ranks == "all" else self.ranks
        pattern = self.expected.reason.format(rank=rank, phase=self.phase, deadline=deadline_s)
        return re.match(pattern, reason) is not None


MATRIX = [Cell(*cell) for cell in itertools.product(faults.KINDS, RANKS, faults.PHASES)]

# One trial a kind for the ordinary run: each phase and each choice of ranks is among them.
ONE_OF_EACH = [
    Cell("torch_oom", "1", "measure"),
    Cell("nccl_oom", "0", "warmup"),
    Cell("host_oom", "all", "handover"),
    Cell("exception", "1", "init"),
    Cell("hang", "1", "measure"),
    Cell("segfault", "0", "handover"),
    Cell("sigkill", "1", "correctness"),
    Cell("slow", "1", "measure"),
    Cell("exit", "1", "measure"),
]
