"""The documents of a stream: lengths drawn batch after batch from a seed, and the packs that they fill. Pure: the same
for every policy and method."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from sp_bench.config.documents import MULTIPLE, causal_pairs, drawn, from_text, rounded
from sp_bench.config.trial import TrialConfig

Filling = Literal["first_fit", "balanced"]


def from_list(lengths: Sequence[int], seed: int) -> Iterator[float]:
    """Lengths of a list without an end, each drawn from all of it."""
    draw = random.Random(seed)
    while True:
        yield draw.choice(lengths)


def from_histogram(bounds: Sequence[float], counts: Sequence[float], seed: int) -> Iterator[float]:
    """Lengths of a histogram without an end. Bucket i has `counts[i]` documents of `bounds[i]` to `bounds[i + 1]`
    tokens; in a bucket the logarithm of the length is uniform."""
    draw, buckets = random.Random(seed), [*itertools.pairwise(map(math.log, bounds))]
    while True:
        ((least, most),) = draw.choices(buckets, counts)
        yield math.exp(draw.uniform(least, most))


def batches(lengths: Iterator[float], tokens: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Batches of `tokens` tokens each, without an end: the lengths in their order, rounded to multiples of 16 and cut
    at `longest`. The last document of a batch is cut where the batch ends, or takes a rest of less than 16 tokens."""
    while True:
        batch, left = [], tokens
        while left:
            length = min(rounded(next(lengths)), longest)
            length = left if left - length < MULTIPLE else length
            batch.append(length)
            left -= length
        yield tuple(batch)


def of_trial(config: TrialConfig) -> Iterator[tuple[int, ...]]:
    """The batches of a trial of `workload.policy`, without an end: the same for each policy and method."""
    workload, seed = config.workload, config.seed
    if workload.document_lens is not None:
        lengths = from_list(from_text(workload.document_lens), seed)
    else:
        assert workload.document_len is not None
        lengths = drawn(workload.packing, workload.document_len, workload.document_sigma or 0.0, seed, config.seq_len)
    return batches(lengths, config.num_sequences * config.seq_len, config.seq_len)


def packs(lengths: Sequence[int], seq_len: int, filling: Filling) -> list[tuple[int, ...]]:
    """The documents, each whole, in packs of at most `seq_len` tokens.

    first_fit: each goes into the first pack with room, in the order drawn. balanced: the longest first, each into the
    pack with room that has the fewest visible pairs so far; there are as many packs as the tokens need, and one more
    wherever none has room.
    """
    if too_long := [length for length in lengths if length > seq_len]:
        raise ValueError(f"a document of {max(too_long)} tokens does not fit into a pack of {seq_len}; cut it first")
    is_balanced = filling == "balanced"
    filled: list[list[int]] = [[] for _ in range(-(-sum(lengths) // seq_len) if is_balanced else 0)]
    tokens, pairs = [0] * len(filled), [0] * len(filled)
    for length in sorted(lengths, reverse=True) if is_balanced else lengths:
        with_room = (i for i, held in enumerate(tokens) if held + length <= seq_len)
        pack = min(with_room, key=pairs.__getitem__, default=None) if is_balanced else next(with_room, None)
        if pack is None:
            pack = len(filled)
            filled.append([])
            tokens.append(0)
            pairs.append(0)
        filled[pack].append(length)
        tokens[pack] += length
        pairs[pack] += causal_pairs([length])
    return [tuple(pack) for pack in filled if pack]
