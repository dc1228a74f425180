"""Which part of a rank's bytes crosses from its node to others, by closed form, and what messages take by a model of
the links.

A rank's node is its number divided by the ranks of a node. Bytes are counted by where they are meant for: a send goes
to one rank; of any other collective each other rank of the group gets an equal part. NCCL may route otherwise: its
rings cross between two nodes once for all that the ranks of a node gather.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from sp_bench.config.machine import NO_DELAY, LinkConfig
from sp_bench.config.parsing import ConfigError


def far_share(op: str, members: Sequence[int], place: int, ranks_per_node: int) -> Fraction:
    """The part of its off-rank bytes that the rank at `place` of a group sends to other nodes. `members`: ranks of the
    world, in the group's order; a send goes to the next of them."""
    own = members[place] // ranks_per_node
    is_far = [member // ranks_per_node != own for member in members]
    if op == "send":
        return Fraction(int(is_far[(place + 1) % len(members)]))
    return Fraction(sum(is_far), max(1, len(members) - 1))


class MessageTime(NamedTuple):
    """What a message takes, in seconds: the time in which it has the links of the host, and the network card, for
    itself, and the time before its first byte. Links that several messages want at once serve them in turn."""

    near_s: float
    far_s: float
    latency_s: float


# Collectives that a link file need not have: they take what another takes for as many bytes.
_LIKE = {"reduce_scatter": "all_gather", "all_reduce": "all_gather", "broadcast": "all_gather"}
_SPREAD = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")  # whose ring crosses with all cards of a host


def message_time(link: LinkConfig, op: str, sent_bytes: float, members: Sequence[int], per_node: int) -> MessageTime:
    """What a collective takes in a group of ranks whose nodes hold `per_node` ranks each.

    sent_bytes: what one rank sends off-rank. Inside a node the links of its GPUs carry them. Where the group spans
    nodes, an all-to-all's part for other nodes goes through the rank's card while the rest goes through the links; a
    ring's hop is as slow as its slowest, which crosses; and a gather crosses between two nodes once, with the cards of
    all its ranks there.

    Raises:
        ConfigError: the link says nothing of such a collective.
    """
    if link.name == NO_DELAY or not sent_bytes:
        return MessageTime(0.0, 0.0, 0.0)
    nodes = {member // per_node for member in members}
    if len(nodes) == 1:
        near, latency = _curve(link, "inside", op, len(members)).busy(sent_bytes)
        return MessageTime(near, 0.0, latency)
    on_node = -(-len(members) // len(nodes))
    far_bytes = sent_bytes
    if op in _SPREAD:
        far_bytes = sent_bytes / on_node
    elif op != "send":
        far_bytes = sent_bytes * (len(members) - on_node) / (len(members) - 1)
    far, latency = _curve(link, "between", op, len(nodes)).busy(far_bytes)
    near_bytes = sent_bytes if op in _SPREAD else sent_bytes - far_bytes
    if on_node == 1 or not near_bytes:
        return MessageTime(0.0, far, latency)
    near, _ = _curve(link, "inside", op, on_node).busy(near_bytes)
    return MessageTime(near, far, latency)


class Curve(NamedTuple):
    """Times of messages by size, straight between its points; beyond the last it goes on at that point's rate."""

    points: tuple[tuple[float, float], ...]  # bytes, us

    def us(self, size: float) -> float:
        above = next((i for i, (known, _) in enumerate(self.points) if known >= size), len(self.points))
        if above == len(self.points):
            return self.points[-1][1] * size / self.points[-1][0]
        (b0, t0), (b1, t1) = self.points[max(above, 1) - 1 : max(above, 1) + 1]
        return max(0.0, t0 + (t1 - t0) * (size - b0) / (b1 - b0))

    def busy(self, size: float) -> tuple[float, float]:
        """Seconds in which a message of `size` bytes has the link for itself, and those before."""
        latency = min(self.us(0), self.us(size))
        return (self.us(size) - latency) / 1e6, latency / 1e6


@cache
def _parsed(text: str) -> Curve:
    pairs = [pair.partition(":") for pair in text.split()]
    return Curve(tuple(sorted((float(size), float(us)) for size, _, us in pairs)))


def _curve(link: LinkConfig, where: str, op: str, number: int) -> Curve:
    """That of the most ranks (hosts) up to `number`, or of the fewest."""
    curves: Mapping[str, str] = getattr(link, where)
    for name in dict.fromkeys((op, _LIKE.get(op, op))):
        known = sorted(int(key.split()[1]) for key in curves if key.split()[0] == name)
        if known:
            nearest = max((n for n in known if n <= number), default=known[0])
            return _parsed(curves[f"{name} {nearest}"])
    unit = "ranks of a host" if where == "inside" else "hosts"
    raise ConfigError(
        f"link={link.name} says nothing of {op} among {number} {unit} (link.{where}); use another file of conf/link, "
        "or link=none"
    )


def curve_problem(link: LinkConfig) -> str | None:
    """What is wrong with the text of a link's curves, or None."""
    for where in ("inside", "between"):
        for key, text in getattr(link, where).items():
            written = f"link.{where}[{key!r}]={text!r}"
            if not re.fullmatch(r"[a-z_]+ [1-9]\d*", key):
                return f"{written}: the key is a collective and a number, such as `all_to_all 2`"
            if not re.fullmatch(rf"{_PAIR}( {_PAIR})+", text):
                return f"{written}: a curve has two points or more, `bytes:us bytes:us`"
            points = _parsed(text).points
            rising = all(a < b and s <= t for (a, s), (b, t) in pairwise(points))
            if not rising:
                return f"{written}: larger messages take as long or longer"
    return None


_PAIR = r"\d+(\.\d+)?:\d+(\.\d+)?"
