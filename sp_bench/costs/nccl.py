"""Device memory outside torch's allocator: of a process, and of NCCL, which one real rank of P lacks; and what it
leaves to tensors, which says what fits.

nccl.json has it in GiB, by least squares over rows: `python -m sp_bench.predict.fitted results/*` writes it anew. The
rows are training steps on H200s over NVLink, on 2 and 4 ranks. In attention alone each is 0.3 less; there the ring and
the all-gather of 4 ranks hold as much as those of 2. Beyond 4 ranks it is assumed that a ring and a gather hold as
much, and an exchange as much more with each peer on the host.
"""

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

FILE = "nccl.json"
GIB = 2**30
# hardware.allocator -> of what torch may hold, what tensors take where memory runs out; the rest lies between. 0.77
# to 0.95 in five searches with torch's own. With expandable_segments what fitted took 0.89 to 0.99, and what did not
# would have taken 0.95 to 1.08, in 36; on one GPU, without NCCL's memory, 1.02 and 1.04
TENSORS_SHARE = {None: 0.85, "expandable_segments": 0.98}
TIGHT = 0.95  # of what torch may hold: of tensors that took more, some ran out of memory


class Held(NamedTuple):
    """GiB of each kind on a rank; or how many of each a rank has."""

    process: float = 1  # a context and libraries
    groups: float = 0  # communicators of gathers and reductions
    neighbours: float = 0  # sends of a ring, or of an exchange between 2 ranks
    peers: float = 0  # of an exchange, each further rank on the host


@cache
def known() -> Held:
    return Held(**json.loads(files("sp_bench.costs").joinpath(FILE).read_text("utf-8")))


def counts(ulysses_degree: int, ranks_per_node: int, *, sends: bool) -> Held:
    """How many of each kind a rank of several has. sends: whether the method passes keys and values around a ring."""
    on_host = min(ulysses_degree, ranks_per_node)
    return Held(groups=1, neighbours=sends + (ulysses_degree > 1), peers=max(0, on_host - 2))


def outside_bytes(number: Held) -> int:
    return round(GIB * sum(each * gib for each, gib in zip(number, known(), strict=True)))


def usable_bytes(device_bytes: float, number: Held, allocator: str | None) -> float:
    """What tensors can take of a device, or of what a process may hold of it. A trial is expected to fit if its peak is
    no more: searches begin there, and `advise` and `project` offer nothing beyond."""
    return TENSORS_SHARE[allocator] * (device_bytes - outside_bytes(number))
