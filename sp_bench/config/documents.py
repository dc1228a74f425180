"""The lengths of the documents that are packed into one sequence. Pure: the same on every rank, for every method."""

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal

MULTIPLE = 16  # lengths are rounded to it
MAX_DOCUMENTS = 1024  # of a pack: the proof at the timed length samples the last token of each
Packing = Literal["none", "fixed", "lognormal"]


@cache
def documents(packing: Packing, seq_len: int, document_len: float, document_sigma: float, seed: int) -> tuple[int, ...]:
    """Lengths in tokens, in the order of the pack; they add up to `seq_len`. Empty: no packing.

    fixed: all are `document_len` tokens long. lognormal: the median is `document_len`, and `document_sigma` is the
    standard deviation of the logarithm. Each is rounded to a multiple of 16, and is at most half of the pack, so that
    there are two or more. The last one is cut where the pack ends, or takes a rest of less than 16 tokens.
    """
    if packing == "none":
        return ()
    draw = random.Random(seed)
    longest, left, lengths = max(seq_len // 2 // MULTIPLE, 1) * MULTIPLE, seq_len, []
    while left:
        drawn = document_len if packing == "fixed" else draw.lognormvariate(math.log(document_len), document_sigma)
        length = min(max(round(drawn / MULTIPLE), 1) * MULTIPLE, longest)
        length = left if left - length < MULTIPLE else length  # no rest that is shorter than any document
        lengths.append(length)
        left -= length
    return tuple(lengths)


def spans(lengths: Sequence[int]) -> Iterator[range]:
    """The positions of each document in the pack."""
    start = 0
    for length in lengths:
        yield range(start, start + length)
        start += length


def cut(lengths: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """Lengths of the documents of a pack that ends after `seq_len` tokens: the last of them is cut there."""
    return tuple(min(whole.stop, seq_len) - whole.start for whole in spans(lengths) if whole.start < seq_len)


def causal_pairs(lengths: Sequence[int]) -> int:
    """Visible (query, key) pairs of one head, where each token sees its own document's up to itself."""
    return sum(length * (length + 1) // 2 for length in lengths)
