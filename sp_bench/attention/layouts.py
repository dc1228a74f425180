"""Which token lives on which rank, and which block of scores each ring step computes. Pure index maths, no torch.

S global tokens of one sequence; P = R * U ranks; R = ring_degree, U = ulysses_degree; s = S / P tokens a rank.
A ring rank holds a *shard* of S / R tokens; its U ulysses ranks hold consecutive slices of that shard, so that
gathering the slices over the ulysses group gives the shard back in order.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain
from typing import Literal, NamedTuple

from sp_bench.config.documents import spans
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import Window

LayoutKind = Literal["contiguous", "zigzag", "striped", "document_zigzag", "zigzag_by_kind"]


@dataclass(frozen=True)
class SequenceLayout:
    """How a sequence is cut over the `ring_degree * ulysses_degree` ranks of one sequence-parallel group.

    contiguous: ring rank r holds tokens [r*S/R, (r+1)*S/R).
    zigzag: chunks r and 2R-1-r of 2R, so that causal work is equal on all ring ranks.
    striped: tokens r, r+R, r+2R, ... (Striped Attention, arXiv 2311.09431).
    document_zigzag: of each packed document what zigzag would give, so that each document's work is equal on all ranks.
        The early chunks of all documents come first, then the late ones.
    zigzag_by_kind: as zigzag. Attention under a window is computed on contiguous tokens (`computed_on`), and so is the
        gated delta rule.
    """

    kind: LayoutKind = "contiguous"
    ring_degree: int = 1
    ulysses_degree: int = 1
    ulysses_inner: bool = True  # True: adjacent ranks exchange heads; False: adjacent ranks are ring neighbours
    over_all_ranks: bool = False  # True: tokens lie as in a ring of all R * U ranks, although some exchange heads
    documents: tuple[int, ...] = ()  # document_zigzag: tokens of each
    by_document: bool = False  # document_zigzag: True: both chunks of a document lie side by side, as libraries want it

    @property
    def sp_size(self) -> int:
        return self.ring_degree * self.ulysses_degree

    @property
    def multiple(self) -> int:
        """The sequence length must be a multiple of this."""
        if self.over_all_ranks:
            return SequenceLayout(self.kind, self.sp_size).multiple
        per_shard = math.lcm(2, self.ulysses_degree) if "zigzag" in self.kind else self.ulysses_degree
        return self.ring_degree * per_shard

    def padded(self, seq_len: int) -> int:
        """The smallest length of at least `seq_len` that this layout can cut."""
        return -(-seq_len // self.multiple) * self.multiple

    def unsupported_reason(self, seq_len: int, of_documents: int = 1) -> Prose | None:
        """Why this layout cannot cut `seq_len` tokens, naming the nearest lengths that it can cut, or None. Those are
        multiples of `of_documents` too, to which the lengths of packed documents are rounded."""
        if seq_len % self.multiple == 0:
            return None
        unit = math.lcm(self.multiple, of_documents)
        above = -(-seq_len // unit) * unit
        below = above - unit
        nearest = f"{below} or {above}" if below else f"{above}"
        return (
            f"seq_len={seq_len} is not divisible by {self.multiple} "
            f"({self.kind} layout, sp_size={self.sp_size}); nearest lengths: {nearest}"
        )

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(ring rank, ulysses rank) of a rank of the sequence-parallel group."""
        if self.ulysses_inner:
            return divmod(rank, self.ulysses_degree)
        ulysses_rank, ring_rank = divmod(rank, self.ring_degree)
        return ring_rank, ulysses_rank

    def runs(self, rank: int, seq_len: int) -> Sequence[range]:
        """The global positions of the tokens of `rank`, in local order, as one range for each run of equal stride."""
        if self.over_all_ranks:
            ring = replace(self, ring_degree=self.sp_size, ulysses_degree=1, over_all_ranks=False)
            return ring.runs(rank, seq_len)
        ring_rank, ulysses_rank = self.coordinates(rank)
        shard = seq_len // self.ring_degree
        if self.kind == "document_zigzag":
            assert sum(self.documents) == seq_len, "its documents cut the sequence"
            zigzag = SequenceLayout("zigzag", self.ring_degree)
            chunks = [
                [range(whole.start + run.start, whole.start + run.stop) for run in zigzag.runs(ring_rank, len(whole))]
                for whole in spans(self.documents)
            ]
            return list(chain(*chunks if self.by_document else zip(*chunks, strict=True)))
        if self.kind == "contiguous":
            parts = [range(ring_rank * shard, (ring_rank + 1) * shard)]
        elif self.kind == "striped":
            parts = [range(ring_rank, seq_len, self.ring_degree)]
        else:
            half = shard // 2
            mirror = 2 * self.ring_degree - 1 - ring_rank
            parts = [range(c * half, (c + 1) * half) for c in (ring_rank, mirror)]
        local = shard // self.ulysses_degree
        return _slice_runs(parts, ulysses_rank * local, (ulysses_rank + 1) * local)

    def global_positions(self, rank: int, seq_len: int) -> list[int]:
        """The global position of each local token of `rank`, in local order; the ranks together hold 0..S-1 once."""
        return [position for run in self.runs(rank, seq_len) for position in run]


def computed_on(kind: LayoutKind, window: int | None) -> LayoutKind:
    """The layout in which attention computes the tokens of ranks that hold them as `kind`."""
    if kind != "zigzag_by_kind":
        return kind
    return "zigzag" if window is None else "contiguous"


def _slice_runs(parts: Sequence[range], start: int, stop: int) -> list[range]:
    """Elements `start` to `stop` of the ranges laid end to end, as ranges."""
    sliced = []
    for part in parts:
        run = part[max(start, 0) : max(stop, 0)]
        if run:
            sliced.append(run)
        start, stop = start - len(part), stop - len(part)
    return sliced


@dataclass(frozen=True)
class Block:
    """The visible part of one ring step: queries `q`, keys `kv` (slices of the local shards), and its mask.

    `causal` means query i of the slice sees keys 0..i of the slice; both slices then have the same length.
    """

    q: slice
    kv: slice
    causal: bool
    documents: tuple[int, ...] = ()  # packed: how many of the queries, and of the keys, each document has, in order
    window: Window | None = None  # the whole mask of the block, or of each document; `causal` is then False

    @property
    def mask(self) -> dict[str, tuple[int, ...]]:
        """The kernel's arguments beside tensors, `causal` and scale; empty where neither documents nor a window hide
        anything."""
        masks = {"documents": self.documents, "window": self.window}
        return {name: mask for name, mask in masks.items() if mask}


ALL = slice(None)


def visible_block(kind: LayoutKind, q_rank: int, kv_rank: int, shard_len: int, *, causal: bool) -> Block | None:
    """What ring rank `q_rank` computes against the KV shard of ring rank `kv_rank`; None if all of it is masked.

    The slices need not be the whole shard: under zigzag a rank computes half of each off-diagonal block, so every
    rank does the same work at every step.
    """
    if not causal:
        return Block(ALL, ALL, causal=False)
    if q_rank == kv_rank:
        return Block(ALL, ALL, causal=True)
    later = q_rank > kv_rank
    if kind == "contiguous":
        return Block(ALL, ALL, causal=False) if later else None
    if kind == "zigzag":
        half = shard_len // 2
        # Of an earlier rank's shard, all queries see all of the early chunk and none of the late one.
        # Of a later rank's shard, only the late queries see anything, and they see all of it.
        return Block(ALL, slice(0, half), causal=False) if later else Block(slice(half, None), ALL, causal=False)
    # striped: query i sits at i*R + q_rank and key j at j*R + kv_rank, so j <= i is visible if kv_rank <= q_rank,
    # else j < i.
    if later:
        return Block(ALL, ALL, causal=True)
    return Block(slice(1, None), slice(0, shard_len - 1), causal=True) if shard_len > 1 else None


@cache  # in a short step the device waits for the host
def packed_blocks(
    kind: LayoutKind, q_rank: int, kv_rank: int, ring_degree: int, documents: tuple[int, ...]
) -> list[Block]:
    """The blocks that ring rank `q_rank` computes against the KV shard of ring rank `kv_rank`, in a pack of documents
    of these lengths. Not for striped shards; for document_zigzag see `_blocks_of_chunks`.

    Its own shard is one causal block, with documents cut at the shard's ends. A document in both chunks of a zigzag
    shard fills everything between them, so its two parts are neighbours in the shard. Of another shard the queries see
    at most one document, the one that continues into theirs: one whole block.
    """
    if kind == "document_zigzag":
        return _blocks_of_chunks(q_rank, kv_rank, [length // (2 * ring_degree) for length in documents])
    layout, seq_len = SequenceLayout(kind, ring_degree), sum(documents)
    queries = placed(layout.runs(q_rank, seq_len))
    if q_rank == kv_rank:
        own = (
            min(whole.stop, run.stop) - max(whole.start, run.start) for whole in spans(documents) for _, run in queries
        )
        parts = list(own)  # by document, then by run; negative where they do not meet
        num_runs = len(queries)
        lengths = (sum(max(n, 0) for n in parts[at : at + num_runs]) for at in range(0, len(parts), num_runs))
        return [Block(ALL, ALL, causal=True, documents=tuple(n for n in lengths if n))]
    return [
        Block(_within(q_at, run, seen[0]), _within(kv_at, keys, seen[1]), causal=False)
        for q_at, run in queries
        for kv_at, keys in placed(layout.runs(kv_rank, seq_len))
        if (seen := seen_across(run, keys, documents))
    ]


def _blocks_of_chunks(q_rank: int, kv_rank: int, chunks: Sequence[int]) -> list[Block]:
    """document_zigzag: the blocks of documents that are cut into chunks of these lengths. A shard has the early
    chunk of each, then the late chunk of each. Chunks of a document are equally long, so that one call of the kernel
    computes all documents, and each chunk sees the whole of an earlier one."""
    early, late = slice(0, sum(chunks)), slice(sum(chunks), None)
    if q_rank == kv_rank:
        every = Block(ALL, ALL, causal=True, documents=(*chunks, *chunks))
        return [every, Block(late, early, causal=False, documents=tuple(chunks))]
    seen = [(early, early), (late, early)] if q_rank > kv_rank else [(late, early), (late, late)]
    return [Block(q, kv, causal=False, documents=tuple(chunks)) for q, kv in seen]


class Piece(NamedTuple):
    """Consecutive tokens of one ring rank, among those that a rank wants."""

    rank: int
    rows: slice  # where they are among that rank's tokens
    at: slice  # where they are among the wanted ones


@dataclass(frozen=True)
class Borders:
    """What a ring rank computes under a window that hides far keys: its runs of consecutive tokens against themselves,
    and against the keys just before them, their borders."""

    own: tuple[Block, ...]  # one for each run; together they cover all queries
    before: tuple[Block, ...]  # keys are those of the borders, end to end
    pieces: tuple[Piece, ...]  # which tokens these are
    num_keys: int  # of the borders

    @property
    def num_blocks(self) -> "NumBlocks":
        return NumBlocks(len(self.own), len(self.own) + len(self.before))


@cache  # in a short step the device waits for the host
def borders(
    kind: LayoutKind, rank: int, ring_degree: int, seq_len: int, window: int, documents: tuple[int, ...] = ()
) -> Borders:
    """Those of ring rank `rank`; contiguous or zigzag. Runs that are neighbours are one. A border is at most
    `window` - 1 keys; the rank itself may hold some of them. Where documents are packed, it begins no earlier than the
    document that goes on from it to the run."""
    layout, wholes = SequenceLayout(kind, ring_degree), list(spans(documents or (seq_len,)))
    runs = _joined(layout.runs(rank, seq_len))
    going_on = [next(whole for whole in wholes if run.start in whole) for run in runs]
    of_runs = [
        range(max(run.start - window + 1, whole.start), run.start) for run, whole in zip(runs, going_on, strict=True)
    ]
    wanted = _joined(of_runs)
    pieces = _pieces(layout, wanted, seq_len)
    own, before = [], []
    for (rows, run), whole, border in zip(placed(runs), going_on, of_runs, strict=True):
        of_run, inside = slice(rows, rows + len(run)), cut_by(wholes, run)
        hides = window < max(inside)
        packed = inside if len(inside) > 1 else ()
        mask = Window(window - 1, 0) if hides else None
        own.append(Block(of_run, of_run, causal=not hides, documents=packed, window=mask))
        if not border:
            continue
        seeing = min(len(run), whole.stop - run.start, window - 1)
        at, keys = next((at, keys) for at, keys in placed(wanted) if border.start in keys)
        hides = seeing + len(border) > window  # something of the border from the last query that sees any of it
        # Where more queries than keys see a border, the first of them see all of it. They get a block without a mask:
        # with one FlashAttention-2 would hide keys from them, since it lowers a window's right side to the number of
        # keys.
        free = window - len(border) if hides and seeing > len(border) else 0
        of_border = _within(at, keys, border)
        if free:
            before.append(Block(slice(rows, rows + free), of_border, causal=False))
        mask = Window(window - 1 - seeing, seeing - free - 1) if hides else None
        before.append(Block(slice(rows + free, rows + seeing), of_border, causal=False, window=mask))
    return Borders(tuple(own), tuple(before), pieces, sum(map(len, wanted)))


@cache  # in a short step the device waits for the host
def pieces_of_shard(
    held: LayoutKind, wanted: LayoutKind, rank: int, ring_degree: int, seq_len: int
) -> tuple[Piece, ...]:
    """Where the tokens that ring rank `rank` holds in the layout `wanted` are among those of the layout `held`. Neither
    is striped."""
    runs = SequenceLayout(wanted, ring_degree).runs(rank, seq_len)
    return _pieces(SequenceLayout(held, ring_degree), runs, seq_len)


def _pieces(held: SequenceLayout, wanted: Sequence[range], seq_len: int) -> tuple[Piece, ...]:
    """The tokens of the ranges `wanted`, laid end to end, as pieces of the ring ranks that hold them."""
    return tuple(
        Piece(holder, _within(rows, run, part), _within(at, tokens, part))
        for holder in range(held.ring_degree)
        for rows, run in placed(held.runs(holder, seq_len))
        for at, tokens in placed(wanted)
        if (part := range(max(run.start, tokens.start), min(run.stop, tokens.stop)))
    )


def _joined(runs: Iterable[range]) -> list[range]:
    """The ranges in order, each with those that overlap it or begin where it ends; without empty ones."""
    joined: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda run: run.start):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return joined


@cache  # in a short step the device waits for the host
def tails(kind: LayoutKind, rank: int, ring_degree: int, seq_len: int, window: int) -> tuple[slice, ...]:
    """Where among the tokens of ring rank `rank` those are that others' queries may see: the last of each run."""
    runs = SequenceLayout(kind, ring_degree).runs(rank, seq_len)
    return tuple(slice(rows + max(len(run) - window + 1, 0), rows + len(run)) for rows, run in placed(runs))


def striped_window_blocks(rank: int, ring_degree: int, shard_len: int, window: int) -> list[Block | None]:
    """What ring rank `rank` computes of striped tokens against its own KV shard, and against those of the ranks before
    it, as far as the window reaches. None: it sees nothing there."""
    return [
        _striped_window_block(rank - (rank - step) % ring_degree, ring_degree, shard_len, window)
        for step in range(min(ring_degree, window))
    ]


def _striped_window_block(ahead: int, ring_degree: int, shard_len: int, window: int) -> Block | None:
    """Query i is `ahead` + (i - j) * R tokens ahead of key j, and sees it from 0 to `window` - 1 ahead. So j is i or
    earlier, or before i where `ahead` is negative."""
    first = int(ahead < 0)
    last = (window - 1 - ahead) // ring_degree
    length = shard_len - first
    if not length:
        return None
    left = last - first
    mask = Window(left, 0) if left < length - 1 else None
    return Block(slice(first, None), slice(0, length), causal=mask is None, window=mask)


@cache
def shares_of_ranks(layout: SequenceLayout, shape: AttentionShape) -> tuple[Fraction, ...]:
    """Which part of all attention each rank computes, by the pairs that its queries see."""
    pairs = [1] * layout.ring_degree
    if layout.ring_degree > 1 and shape.causal and not shape.gated_delta:
        pairs = causal_pairs_of_ranks(layout, shape.documents or (shape.seq_len,), shape.window)
    rings = (layout.coordinates(rank)[0] for rank in range(layout.sp_size))
    return tuple(Fraction(pairs[ring], sum(pairs) * layout.ulysses_degree) for ring in rings)


class NumBlocks(NamedTuple):
    """How many blocks a ring rank computes of packed documents, or under a window."""

    own: int  # against its own KV shard
    all: int


def num_blocks(kind: LayoutKind, rank: int, ring_degree: int, shape: AttentionShape) -> NumBlocks | None:
    """Those of ring rank `rank`; None where neither documents nor a window hide anything."""
    if shape.window is not None:
        if kind != "striped":
            return borders(kind, rank, ring_degree, shape.seq_len, shape.window, shape.documents).num_blocks
        blocks = striped_window_blocks(rank, ring_degree, shape.seq_len // ring_degree, shape.window)
        return NumBlocks(1, sum(block is not None for block in blocks))
    if not shape.documents:
        return None
    of_shards = [len(packed_blocks(kind, rank, kv, ring_degree, shape.documents)) for kv in range(ring_degree)]
    return NumBlocks(of_shards[rank], sum(of_shards))


def seen_across(run: range, keys: range, documents: Sequence[int]) -> tuple[range, range] | None:
    """The queries of `run` that see something of `keys`, which end before it or where it begins, and the keys that they
    see; None: no document lies in both, or the keys come later."""
    if not len(keys) or keys.stop > run.start:
        return None
    whole = next(whole for whole in spans(documents) if keys.stop - 1 in whole)
    if whole.stop <= run.start:
        return None
    return range(run.start, min(run.stop, whole.stop)), range(max(keys.start, whole.start), keys.stop)


def cut_by(wholes: Iterable[range], run: range) -> tuple[int, ...]:
    """How many tokens of `run` each document has that has any."""
    met = (min(whole.stop, run.stop) - max(whole.start, run.start) for whole in wholes)
    return tuple(length for length in met if length > 0)


def placed(runs: Sequence[range]) -> list[tuple[int, range]]:
    """Each run with its place among the local tokens."""
    starts = accumulate((len(run) for run in runs), initial=0)
    return list(zip(starts, runs, strict=False))


def _within(place: int, run: range, part: range) -> slice:
    """Local tokens of `part` of a run that begins at `place`."""
    return slice(place + part.start - run.start, place + part.stop - run.start)


def causal_pairs_of_ranks(layout: SequenceLayout, documents: Sequence[int], window: int | None = None) -> list[int]:
    """Visible (query, key) pairs of one head that each ring rank computes, where documents of these lengths are packed.
    Ranks that exchange heads compute those of their ring rank, of as many heads each."""
    kind = computed_on(layout.kind, window)
    ring = SequenceLayout(kind, layout.ring_degree, documents=tuple(documents) if kind == "document_zigzag" else ())
    wholes = list(spans(documents))
    starts = [whole.start for whole in wholes]
    return [
        sum(
            _causal_pairs(run[bisect_left(run, whole.start) : bisect_left(run, whole.stop)], whole.start, window)
            for run in ring.runs(rank, sum(documents))
            for whole in wholes[bisect_right(starts, run.start) - 1 : bisect_right(starts, run.stop - 1)]
        )
        for rank in range(layout.ring_degree)
    ]


def _causal_pairs(run: range, start: int, window: int | None) -> int:
    """Keys that the queries of `run` see together, of a document that begins at `start`."""
    seen = range(run.start - start + 1, run.stop - start + 1, run.step)
    growing = seen if window is None else seen[: bisect_right(seen, window)]
    rest = (len(seen) - len(growing)) * (window or 0)
    return (growing[0] + growing[-1]) * len(growing) // 2 + rest if growing else rest


def head_groups(num_heads: int, num_kv_heads: int, stride: int) -> list[tuple[slice, slice]]:
    """Cut the heads into groups of `stride` KV heads; the last may have fewer. Gives of each group the query heads, and
    the KV heads that they read."""
    per_kv_head = num_heads // num_kv_heads
    cuts = [(first, min(first + stride, num_kv_heads)) for first in range(0, num_kv_heads, stride)]
    return [(slice(first * per_kv_head, end * per_kv_head), slice(first, end)) for first, end in cuts]
