"""Which ranks compute which documents of a batch: three policies, over any cost of a document.

P ranks, a power of two. A group is k = 1, 2, 4 ... P adjacent ranks of which the first is a multiple of k. There are
2P - 1 of them, so each communicator is made once. Each rank computes with its larger groups first. Groups nest, so all
ranks of a group have had the same work when they come to it, and a rank waits for others at the end of the batch only.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from sp_bench.config.documents import causal_pairs
from sp_bench.config.streams import packs
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.training import matmul_parameters

Cost = Callable[[int, int], float]  # (tokens of a document, ranks of its group) -> time on each of these ranks
FINER = 1.05  # a limit of time over the one that was tried before
SURPLUS = (1e-9, 0.1, 0.3, 1.0)  # of work over the least
SHARED = 0.05  # of a document's work: messages and smaller kernels; a plan needs some price of a larger group
NEAR = 1.01  # over the lower bound: no better plan is sought


class Ranks(NamedTuple):
    number: int
    held_tokens: int  # of one rank at a time
    largest_group: int

    def sizes(self, length: int) -> list[int]:
        """Ranks of the groups that hold a document of so many tokens.

        Raises:
            ValueError: none does, or a number is no power of two.
        """
        sizes = [2**n for n in range(self.largest_group.bit_length()) if length <= 2**n * self.held_tokens]
        if not sizes or any(n < 1 or n & (n - 1) for n in (self.number, self.largest_group)):
            raise ValueError(
                f"no group holds a document of {length} tokens: {self}; use more ranks, a power of two, or cut it"
            )
        return sizes


class Placed(NamedTuple):
    documents: tuple[int, ...]  # one, or those of a pack
    first_rank: int
    num_ranks: int


Passes = Sequence[Sequence[Placed | None]]  # one after the other, of each what each rank computes; None: nothing


def loads(placed: Sequence[Placed], ranks: Ranks, cost: Cost) -> list[float]:
    """The time of each rank. The batch takes the largest."""
    found = [0.0] * ranks.number
    for documents, first, size in placed:
        ms = sum([cost(length, size) for length in documents])
        for rank in range(first, first + size):
            found[rank] += ms
    return found


def static(
    packs: Sequence[tuple[int, ...]], ranks: Ranks, sp_size: int, cost: Cost, *, is_balanced: bool
) -> list[Placed]:
    """Every pack over `sp_size` ranks. The packs go to the groups in turn; balanced: the longest first, each to the
    group that is free first."""
    if is_balanced:
        return _placed(dict(enumerate(packs)), [sp_size] * len(packs), ranks, cost)[0]
    return [Placed(pack, index * sp_size % ranks.number, sp_size) for index, pack in enumerate(packs)]


def per_document(lengths: Sequence[int], ranks: Ranks, cost: Cost) -> list[Placed]:
    """Each document whole on one rank, or over the largest group if one rank cannot hold it."""
    sizes = [1 if 1 in ranks.sizes(length) else ranks.largest_group for length in lengths]
    return _placed({i: (length,) for i, length in enumerate(lengths)}, sizes, ranks, cost)[0]


def dynamic(lengths: Sequence[int], ranks: Ranks, cost: Cost) -> list[Placed]:
    """Each document on a group of the size and at the place with which the slowest rank ends first, as far as is found.

    Sizes are tried by two rules (`_rules`). The largest groups are placed first, and of a size the longest times, each
    where the ranks are free first. From the best plan, documents of the slowest rank move to other groups while that
    helps.
    """
    items = {i: (length,) for i, length in enumerate(lengths)}
    enough = NEAR * lower_bound(lengths, ranks, cost)
    best, least, tried = [], math.inf, set()
    for rule in _rules(lengths, ranks, cost):
        sizes = tuple(rule[length] for length in lengths)
        if sizes in tried:
            continue
        tried.add(sizes)
        placed, ms = _placed(items, sizes, ranks, cost)
        if max(ms) < least:
            best, least = placed, max(ms)
        if least <= enough:
            return best
    return _moved(best, ranks, cost)


def _rules(lengths: Sequence[int], ranks: Ranks, cost: Cost) -> Iterator[dict[int, int]]:
    """The size of the group of each length. Its work is its time on k ranks, k times.

    By a limit of time: the size of least work within the limit, which grows from the lower bound until it changes
    nothing. By a surplus of work: the largest size whose work is within that of the least. Both for each largest size
    that holds all documents. Then one size for all.
    """
    all_times, bound = _times(lengths, ranks, cost), lower_bound(lengths, ranks, cost)
    tops = list(min(all_times.values(), key=len))[::-1]  # sizes that hold every document
    for top in tops:
        times = {length: {k: ms for k, ms in each.items() if k <= top} for length, each in all_times.items()}
        limit = max(bound, *(min(each.values()) for each in times.values()))  # so each has a size within it
        while limit <= FINER * max(max(each.values()) for each in times.values()):
            yield {
                length: min((k for k, ms in each.items() if ms <= limit), key=lambda k: k * each[k])
                for length, each in times.items()
            }
            limit *= FINER
        for surplus in SURPLUS:
            yield {
                length: max(k for k, ms in each.items() if k * ms <= (1 + surplus) * min(n * each[n] for n in each))
                for length, each in times.items()
            }
    for size in tops:
        yield dict.fromkeys(all_times, size)


def _moved(placed: Sequence[Placed], ranks: Ranks, cost: Cost) -> list[Placed]:
    """A plan whose slowest rank no move of one of its documents makes faster."""
    placed = list(placed)
    while True:
        now = loads(placed, ranks, cost)
        best, change = sorted(now, reverse=True), None
        slowest = now.index(best[0])
        for index, each in enumerate(placed):
            if not each.first_rank <= slowest < each.first_rank + each.num_ranks:
                continue
            (length,) = each.documents
            for size in ranks.sizes(length):
                for first in range(0, ranks.number, size):
                    after = list(now)
                    for there, sign in ((each, -1), (Placed(each.documents, first, size), 1)):
                        for rank in range(there.first_rank, there.first_rank + there.num_ranks):
                            after[rank] += sign * cost(length, there.num_ranks)
                    if sorted(after, reverse=True) < best:
                        best, change = sorted(after, reverse=True), (index, Placed(each.documents, first, size))
        if change is None or best[0] > max(now) * (1 - 1e-9):  # roundings of sums are no gain
            return placed
        placed[change[0]] = change[1]


def lower_bound(lengths: Sequence[int], ranks: Ranks, cost: Cost) -> float:
    """A time that no plan is below: the least work over all ranks, or the document that takes longest at its best."""
    times = _times(lengths, ranks, cost)
    least = {length: min(k * ms for k, ms in each.items()) for length, each in times.items()}
    return max(
        sum(least[length] for length in lengths) / ranks.number, *(min(each.values()) for each in times.values())
    )


def _times(lengths: Sequence[int], ranks: Ranks, cost: Cost) -> dict[int, dict[int, float]]:
    """The time of each length by the size of its group."""
    return {length: {k: cost(length, k) for k in ranks.sizes(length)} for length in set(lengths)}


def of_trial(config: TrialConfig, lengths: Sequence[int]) -> list[list[Placed | None]]:
    """What each rank computes of a batch by `workload.policy`, pass after pass: a pack of documents, or None, for each
    rank [passes][ranks]. All ranks have equally many passes, since FSDP gathers parameters in each."""
    workload = config.workload
    ranks, cost = Ranks(config.world_size, -(-config.seq_len // config.sp_size), config.world_size), by_work(config)
    if workload.policy == "static":
        assert workload.filling is not None
        filled = packs(lengths, config.seq_len, workload.filling)
        plan = static(filled, ranks, config.sp_size, cost, is_balanced=workload.filling == "balanced")
    else:
        plan = _packed((per_document if workload.policy == "per_document" else dynamic)(lengths, ranks, cost), ranks)
    # with the larger groups first all ranks of a group have had as many passes as each other when they come to it
    ordered = sorted(plan, key=lambda each: -each.num_ranks)
    of_ranks = [
        [each for each in ordered if each.first_rank <= rank < each.first_rank + each.num_ranks]
        for rank in range(ranks.number)
    ]
    return [list(each) for each in zip_longest(*of_ranks)]


def by_work(config: TrialConfig) -> Cost:
    """FLOPs of a document's forward on each of its ranks, and SHARED of them more for each doubling of the ranks."""
    model = config.model
    of_token = 2 * matmul_parameters(model)
    of_pair = 4 * model.num_layers * model.num_heads * model.head_dim

    def cost(length: int, ranks: int) -> float:
        return (of_token * length + of_pair * causal_pairs([length])) / ranks * (1 + SHARED * math.log2(ranks))

    return cost


def imbalance(config: TrialConfig, passes: Passes) -> float:
    """The work of the rank that has most, over the mean of all."""
    cost = by_work(config)
    work = [
        sum(cost(length, each.num_ranks) for each in of_rank if each for length in each.documents)
        for of_rank in zip(*passes, strict=True)
    ]
    return max(work) / (sum(work) / len(work))


def _packed(plan: Sequence[Placed], ranks: Ranks) -> list[Placed]:
    """The same documents on the same groups, in packs of what a group holds at a time."""
    of_groups: dict[tuple[int, int], list[int]] = {}
    for documents, *group in plan:
        of_groups.setdefault((group[0], group[1]), []).extend(documents)
    return [
        Placed(pack, first, size)
        for (first, size), lengths in of_groups.items()
        for pack in packs(lengths, size * ranks.held_tokens, "first_fit")
    ]


def _placed(
    items: Mapping[int, tuple[int, ...]], sizes: Sequence[int], ranks: Ranks, cost: Cost
) -> tuple[list[Placed], list[float]]:
    """Each item with a group of its size: the largest groups first, then the longest times, each at the ranks that are
    free first. And the time of each rank."""
    times = [sum([cost(length, size) for length in items[i]]) for i, size in enumerate(sizes)]
    free, placed = [0.0] * ranks.number, []
    for i in sorted(items, key=lambda i: (-sizes[i], -times[i])):
        groups = free[:: sizes[i]]  # the ranks of a group are free at the same time
        first = groups.index(min(groups)) * sizes[i]
        free[first : first + sizes[i]] = [free[first] + times[i]] * sizes[i]
        placed.append(Placed(items[i], first, sizes[i]))
    return placed, free
