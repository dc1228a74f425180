"""Which part of a rank's bytes crosses from its node to others, by closed form.

A rank's node is its number divided by the ranks of a node. Bytes are counted by where they are meant for: a send goes
to one rank; of any other collective each other rank of the group gets an equal part. NCCL may route otherwise: its
rings cross between two nodes once for all that the ranks of a node gather.
"""

from collections.abc import Sequence
from fractions import Fraction


def far_share(op: str, members: Sequence[int], place: int, ranks_per_node: int) -> Fraction:
    """The part of its off-rank bytes that the rank at `place` of a group sends to other nodes. `members`: ranks of the
    world, in the group's order; a send goes to the next of them."""
    own = members[place] // ranks_per_node
    is_far = [member // ranks_per_node != own for member in members]
    if op == "send":
        return Fraction(int(is_far[(place + 1) % len(members)]))
    return Fraction(sum(is_far), max(1, len(members) - 1))
