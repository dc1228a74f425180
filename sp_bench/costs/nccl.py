"""Device memory that NCCL holds outside torch's allocator, which one real rank of P does not have.

From committed rows (`device_used_bytes` less what the allocator has reserved, less the 0.8 GiB that one rank of P has
beside its own tensors) of training steps on H200s over NVLink, in fresh processes, in GiB:

    P=2   all-gather 2.8   ring 3.2   Ulysses 3.2
    P=4   USP of 2 x 2 3.7            Ulysses 3.9

In attention alone each is 0.3 less; there the ring and the all-gather of 4 ranks hold as much as those of 2. Beyond 4
ranks it is assumed that a ring and a gather hold as much, and an exchange as much more with each peer on the host.
"""

GIB = 2**30
GROUPS = 2.75 * GIB  # communicators of gathers and reductions
NEIGHBOURS = 0.45 * GIB  # of the sends of a ring, or of an exchange between 2 ranks
PEER = 0.37 * GIB  # of an exchange, for each further peer on the host


def held_bytes(ulysses_degree: int, ranks_per_node: int, *, sends: bool) -> int:
    """Bytes that NCCL would hold on a rank if the others were there.

    sends: whether the method passes keys and values around a ring.
    """
    exchange = NEIGHBOURS + PEER * (min(ulysses_degree, ranks_per_node) - 2) if ulysses_degree > 1 else 0
    return round(GROUPS + (NEIGHBOURS if sends else 0) + exchange)
