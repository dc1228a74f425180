"""Attention under a window that hides far keys: a rank needs its own keys, and of others' the few just before its own,
its borders. A border begins no earlier than the document that a rank's first token lies in.

A rank computes its own block while its borders travel, and then its queries at the borders. The ring sends a border
from the ranks that hold it to the rank that sees it, in one launch whatever the number of ranks. The gather collects
the keys that any rank's borders have.

B batch, n tokens of a rank, R ranks, Hq and Hkv heads, D head size, b keys of a rank's borders, t tokens of a rank that
others' queries may see.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.attention import layouts
from sp_bench.attention.autograd import Attend, Kept
from sp_bench.attention.exchange import Collectives, Transport
from sp_bench.attention.keys import add, add_all, joined
from sp_bench.attention.layouts import Borders, LayoutKind, Piece
from sp_bench.attention.merge import Part, merge, wide_dtype
from sp_bench.attention.ring import Queries, Ring, backward_block, forward_block
from sp_bench.config.shape import AttentionShape
from sp_bench.kernels import Attention

Arrive = Callable[[], Tensor]


class Cut(NamedTuple):
    """Which keys are whose, and which of them each rank's borders have, at one length."""

    kind: LayoutKind  # contiguous or zigzag
    ring_degree: int
    seq_len: int
    window: int
    documents: tuple[int, ...] = ()  # packed tokens of each; empty: one document

    def borders(self, rank: int) -> Borders:
        return layouts.borders(self.kind, rank, self.ring_degree, self.seq_len, self.window, self.documents)

    def pieces(self, rank: int) -> Sequence[Piece]:
        return self.borders(rank).pieces

    def num_tokens(self, rank: int) -> int:
        return self.borders(rank).num_keys


class Change(NamedTuple):
    """All tokens, held in one layout and wanted in another, at one length. Neither is striped."""

    held: LayoutKind
    wanted: LayoutKind
    ring_degree: int
    seq_len: int

    def pieces(self, rank: int) -> Sequence[Piece]:
        return layouts.pieces_of_shard(self.held, self.wanted, rank, self.ring_degree, self.seq_len)

    def num_tokens(self, rank: int) -> int:
        return self.seq_len // self.ring_degree


class Exchange(Protocol):
    """How borders travel, and their gradients back."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def start(self, kv: Tensor, cut: Cut) -> Arrive:
        """Start to send kv [2,B,n,Hkv,D]. Returns a function that waits and gives this rank's borders [2,B,b,Hkv,D]."""
        ...

    def add_home(self, shares: Tensor, dk: Tensor, dv: Tensor, cut: Cut) -> None:
        """Add to dk and dv [B,n,Hkv,D] of this rank's keys what all ranks found for them. `shares` [2,B,b,Hkv,D] are
        what this rank found for its borders, in the dtype in which they travel."""
        ...


@dataclass(frozen=True)
class Bordered:
    """An `Attention` of this rank's queries over the keys of the group that a window shows them."""

    kernel: Attention
    exchange: Exchange
    layout: LayoutKind
    window: int
    dkv_dtype: torch.dtype  # in which dK/dV travel
    documents: tuple[int, ...] = ()  # packed tokens of each; empty: one document

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """q [B,n,Hq,D], k and v [B,n,Hkv,D] -> out [B,n,Hq,D] in q's dtype, lse [B,Hq,n] in fp32 (fp64 when q is)."""
        kv, cut = joined(k, v), self._cut(q)  # [B,n,Hkv,D] twice -> [2,B,n,Hkv,D]: they travel as one message
        mine = cut.borders(self.exchange.group.rank())
        coming = self.exchange.start(kv, cut)
        attend = partial(forward_block, self.kernel, q, scale, k.shape[-1])
        parts = [attend(kv, block) for block in mine.own]
        like = q.new_empty(*q.shape[:-1], parts[0].values.shape[-1])
        out = _whole(like, [part.rows for part in parts], [part.values for part in parts])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide_dtype(q))
        for part in parts:
            assert part.lse is not None
            lse[:, :, part.rows] = part.lse
        del parts
        border = coming()
        for block in mine.before:
            part = attend(border, block)._replace(rows=slice(None))
            at = out[:, block.q]
            merged_lse = torch.empty_like(lse[:, :, block.q])
            merge([Part(at, lse[:, :, block.q]), part], at, merged_lse)
            lse[:, :, block.q] = merged_lse
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq [B,n,Hq,D], dk and dv [B,n,Hkv,D], in the inputs' dtype."""
        kv, cut = joined(k, v), self._cut(q)
        mine = cut.borders(self.exchange.group.rank())
        coming = self.exchange.start(kv, cut)
        differentiate = partial(backward_block, self.kernel, Queries(dout, q, out, lse), scale, k.shape[-1])
        parts, *of_keys = zip(*(differentiate(kv, block) for block in mine.own), strict=True)
        rows = [block.q for block in mine.own]
        dq = _whole(q, rows, [part.values for part in parts])
        dk, dv = (_whole(x, rows, found) for x, found in zip((k, v), of_keys, strict=True))
        del parts, of_keys
        border = coming()
        shares = torch.zeros_like(border, dtype=self.dkv_dtype)
        for block in mine.before:
            part, *dkv = differentiate(border, block)
            dq[:, block.q] += part.values
            add(shares, block.kv, *dkv)
        self.exchange.add_home(shares, dk, dv, cut)
        return dq, dk, dv

    def _cut(self, q: Tensor) -> Cut:
        size = self.exchange.group.size()
        return Cut(self.layout, size, q.shape[1] * size, self.window, self.documents)


def _whole(like: Tensor, rows: Sequence[slice], parts: Sequence[Tensor]) -> Tensor:
    """The parts at their rows of a tensor like `like`; one part is the whole already."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.empty_like(like)
    for at, part in zip(rows, parts, strict=True):
        whole[:, at] = part
    return whole


@dataclass(frozen=True)
class ToPeers:
    """Each border goes from its holders to the rank that sees it, and to no other."""

    group: dist.ProcessGroup

    def start(self, kv: Tensor, cut: Cut) -> Arrive:
        return collect(kv, cut, self.group)

    def add_home(self, shares: Tensor, dk: Tensor, dv: Tensor, cut: Cut) -> None:
        to_peers, from_peers = _routes(cut, self.group.rank())  # gradients go the other way
        sent = {peer: _at(shares, [piece.at for piece in pieces]) for peer, pieces in from_peers.items()}
        received = {peer: _room(shares, pieces) for peer, pieces in to_peers.items()}
        Collectives(self.group).between(sent, received).wait_all()
        for peer, pieces in to_peers.items():
            for part, piece in zip(_parts(received[peer], pieces), pieces, strict=True):
                add_all(dk, dv, part, piece.rows)
        for piece in _held_by(cut.pieces(self.group.rank()), self.group.rank()):
            add_all(dk, dv, shares[:, :, piece.at], piece.rows)


Routes = Mapping[int, Sequence[Piece]]


def collect(tensor: Tensor, wanted: Cut | Change, group: dist.ProcessGroup) -> Arrive:
    """Start to send tokens of `tensor` [x,B,n,H,D] to the ranks that want them. Returns a function that waits and gives
    those that this rank wants [x,B,w,H,D]."""
    rank = group.rank()
    to_peers, from_peers = _routes(wanted, rank)
    sent = {peer: _at(tensor, [piece.rows for piece in pieces]) for peer, pieces in to_peers.items()}
    received = {peer: _room(tensor, pieces) for peer, pieces in from_peers.items()}
    message = Collectives(group).between(sent, received)
    message.go_first()

    def arrive() -> Tensor:
        message.wait_all()
        whole = tensor.new_empty(*tensor.shape[:2], wanted.num_tokens(rank), *tensor.shape[3:])
        for peer, pieces in from_peers.items():
            for part, piece in zip(_parts(received[peer], pieces), pieces, strict=True):
                whole[:, :, piece.at] = part
        for piece in _held_by(wanted.pieces(rank), rank):
            whole[:, :, piece.at] = tensor[:, :, piece.rows]
        return whole

    return arrive


@cache  # in a short step the device waits for the host
def _routes(wanted: Cut | Change, rank: int) -> tuple[Routes, Routes]:
    """The pieces that each other rank wants of `rank`, and those that `rank` wants of each other."""
    others = [peer for peer in range(wanted.ring_degree) if peer != rank]
    to = {peer: _held_by(wanted.pieces(peer), rank) for peer in others}
    come = {peer: _held_by(wanted.pieces(rank), peer) for peer in others}
    return tuple({peer: pieces for peer, pieces in routes.items() if pieces} for routes in (to, come))  # pyright: ignore


def _held_by(pieces: Sequence[Piece], rank: int) -> list[Piece]:
    return [piece for piece in pieces if piece.rank == rank]


def _room(like: Tensor, pieces: Sequence[Piece]) -> Tensor:
    return like.new_empty(*like.shape[:2], sum(_length(piece.rows) for piece in pieces), *like.shape[3:])


def _parts(tensor: Tensor, pieces: Sequence[Piece]) -> Sequence[Tensor]:
    return tensor.split([_length(piece.rows) for piece in pieces], dim=2)


def _at(tensor: Tensor, rows: Sequence[slice]) -> Tensor:
    """These tokens of [2,B,n,Hkv,D], end to end, in memory of their own."""
    return torch.cat([tensor[:, :, each] for each in rows], dim=2)


def _length(rows: slice) -> int:
    return rows.stop - rows.start


@dataclass(frozen=True)
class Gathered:
    """Every rank gathers the keys that any other rank may see, and reduce-scatters their gradients."""

    transport: Transport

    @property
    def group(self) -> dist.ProcessGroup:
        return self.transport.group

    def start(self, kv: Tensor, cut: Cut) -> Arrive:
        message = self.transport.all_gather(_at(kv, self._tails(cut, self.group.rank())))
        message.go_first()
        mine = cut.borders(self.group.rank())

        def arrive() -> Tensor:
            by_rank = message.wait().unflatten(0, (-1, len(kv)))  # [R*2,B,t,Hkv,D] -> [R,2,B,t,Hkv,D]
            whole = kv.new_empty(*kv.shape[:2], mine.num_keys, *kv.shape[3:])
            for piece in mine.pieces:
                whole[:, :, piece.at] = by_rank[piece.rank][:, :, self._in_tails(cut, piece)]
            return whole

        return arrive

    def add_home(self, shares: Tensor, dk: Tensor, dv: Tensor, cut: Cut) -> None:
        tails = self._tails(cut, self.group.rank())
        num_tokens = sum(map(_length, tails))
        # [R,2,B,t,Hkv,D]: rank axis first
        sent = shares.new_zeros(cut.ring_degree, *shares.shape[:2], num_tokens, *shares.shape[3:])
        for piece in cut.borders(self.group.rank()).pieces:
            sent[piece.rank][:, :, self._in_tails(cut, piece)] = shares[:, :, piece.at]
        home = self.transport.reduce_scatter(sent.flatten(0, 1)).wait()
        for part, rows in zip(home.split([_length(rows) for rows in tails], dim=2), tails, strict=True):
            add_all(dk, dv, part, rows)

    @staticmethod
    def _tails(cut: Cut, rank: int) -> tuple[slice, ...]:
        return layouts.tails(cut.kind, rank, cut.ring_degree, cut.seq_len, cut.window)

    def _in_tails(self, cut: Cut, piece: Piece) -> slice:
        """Where a piece is among the tokens that its holder sends."""
        sent_before = 0
        for tail in self._tails(cut, piece.rank):
            if tail.start <= piece.rows.start < tail.stop:
                start = sent_before + piece.rows.start - tail.start
                return slice(start, start + _length(piece.rows))
            sent_before += _length(tail)
        raise AssertionError(f"{piece} is in no tail")


def ring(
    kernel: Attention,
    transport: Transport,
    layout: LayoutKind,
    shape: AttentionShape,
    dkv_dtype: torch.dtype,
    merge_dtype: torch.dtype,
) -> Attention:
    """The ring of `shape`. Under a window it sends borders alone, unless tokens are striped: then a border has tokens
    of all shards, and whole shards travel as far as the window reaches."""
    if shape.window is not None and layout != "striped":
        return Bordered(kernel, ToPeers(transport.group), layout, shape.window, dkv_dtype, shape.documents)
    return Ring(kernel, transport, layout, dkv_dtype, merge_dtype, shape.documents, shape.window)


class _Converted(torch.autograd.Function):
    """Tokens [B,n,w] of this rank in one layout -> those of another [B,n,w]; gradients go back."""

    @staticmethod
    def forward(ctx, tokens: Tensor, change: Change, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore
        ctx.change, ctx.group = change, group
        return collect(tokens[None], change, group)()[0]

    @staticmethod
    def backward(ctx, found: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        back = ctx.change._replace(held=ctx.change.wanted, wanted=ctx.change.held)
        return collect(found[None], back, ctx.group)()[0], None, None


def in_layout(
    tensors: Sequence[Tensor], held: LayoutKind, wanted: LayoutKind, group: dist.ProcessGroup
) -> list[Tensor]:
    """Tokens [B,n,...] of this rank in one layout -> those of another, of all tensors in one message. They have one
    dtype."""
    change = Change(held, wanted, group.size(), tensors[0].shape[1] * group.size())
    flat = [x.flatten(2) for x in tensors]  # [B,n,H,D] -> [B,n,H*D]
    moved = _Converted.apply(torch.cat(flat, dim=2), change, group).split([x.shape[2] for x in flat], dim=2)
    return [part.unflatten(2, x.shape[2:]).contiguous() for part, x in zip(moved, tensors, strict=True)]


def converted(attend: Attend, held: LayoutKind, computed: LayoutKind, group: dist.ProcessGroup) -> Attend:
    """`attend`, which computes tokens in the layout `computed`, for tokens in the layout `held`: queries, keys and
    values travel in one message, and the output back in another."""

    def converting(q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, sinks: Tensor | None = None, /) -> Tensor:
        q, k, v = in_layout((q, k, v), held, computed, group)
        out = attend(q, k, v, kept, sinks)
        return in_layout((out,), computed, held, group)[0]

    return converting
