"""What a batch of documents takes under each policy, modelled: nothing here was measured.

A document's time on k ranks is that of a training step of its length, by the rates of projection.py, with Ulysses over
the k ranks. The fixed time of a call of attention is shared by the tokens of a full rank, since short documents are
packed. The update is one a batch. Ranks wait for one another at the end of a batch only.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from sp_bench.analysis.cells import Cell
from sp_bench.config.documents import MULTIPLE, drawn, from_file, rounded
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError, nearest, shown
from sp_bench.config.streams import batches, from_histogram, from_list, packs
from sp_bench.config.trial import TrialConfig
from sp_bench.config.yaml_text import read_yaml
from sp_bench.costs import placing
from sp_bench.formats import number, text_table, whole
from sp_bench.predict.candidates import Candidate, Cluster, NothingFits, candidates, links_of, preferred, works_of
from sp_bench.predict.projection import Fit, Links, pass_and_update_ms, step_options

BATCHES = 100
PADDED = 10_000  # documents
SEED = 0
METHODS = ("single", "ulysses")
ASSUMPTIONS = (
    "Modelled: no batch was run. A batch has a sequence's tokens for each GPU. A document's GPUs are adjacent and run "
    "Ulysses; a document on one GPU sends nothing. A GPU holds as many tokens at a time as the smallest static "
    "group leaves it. All policies compute the same documents. Parameters travel beside the computing, and a GPU waits "
    "for others at the end of a batch only, so FSDP's gathers must not tie their passes together. static: packs of "
    "whole documents, all over as many GPUs; in turn: filled by first fit in the order drawn, and dealt to the groups "
    "in turn; balanced: filled and dealt so that groups have equal work. per document: on one GPU, or over all GPUs "
    "where one cannot hold it. dynamic: each over 1, 2, 4 ... GPUs so that the slowest GPU ends first."
)


@dataclass(frozen=True)
class Policy:
    """One policy over the batches drawn from one distribution of lengths."""

    model: str
    lengths: str
    gpus: int
    seq_len: int
    policy: str
    sp_size: int | None  # None: it differs from document to document
    batch_ms: float  # mean over batches
    imbalance: float  # the slowest GPU's time over the mean of all, mean over batches
    tokens_per_s_per_gpu: float
    over_dynamic: float  # its time over that of dynamic
    over_bound: float  # in the worst batch, its time over one that no plan is below


def document_lengths(text: str, longest: int) -> Iterator[float]:
    """Lengths without an end: those of `fixed:4096`, `lognormal:2048:1.0` (median and sigma), `@lengths.txt`, or of a
    name in lengths.yaml.

    Raises:
        ConfigError: it is none of these, or the file is no list.
    """
    published = read_yaml(files("sp_bench.predict").joinpath("lengths.yaml").read_text("utf-8"), "lengths.yaml")
    if text.startswith("@"):
        return from_list(from_file(Path(text[1:]), None), SEED)
    if text in published:
        return from_histogram(published[text]["bounds"], published[text]["documents"], SEED)
    if found := re.fullmatch(r"fixed:([1-9]\d{0,8})", text):
        return drawn("fixed", float(found[1]), 0.0, SEED, longest)
    if found := re.fullmatch(r"lognormal:([1-9]\d{0,8}):(\d{1,2}(?:\.\d{1,9})?)", text):
        return drawn("lognormal", float(found[1]), float(found[2]), SEED, longest)
    raise ConfigError(
        f"--lengths {shown(text)}: {nearest(text, published)}use fixed:TOKENS, lognormal:MEDIAN:SIGMA, @FILE with a "
        f"length a line, or one of {', '.join(published)}"
    )


def policies(fit: Fit, config: TrialConfig, cluster: Cluster, lengths: str, kept: Sequence[str]) -> list[Policy]:
    """Each policy, over batches of `config`'s model whose longest document has its length.

    Raises:
        NotProjectable: nothing fits, or rates are missing.
        ConfigError: the lengths, or the number of GPUs, cannot be used.
    """
    gpus, seq_len = cluster.gpus, config.seq_len // MULTIPLE * MULTIPLE
    ways = [each for each in candidates(fit, config, cluster, kept) if each.config.method.name in METHODS]
    if not ways:
        raise NothingFits(f"nothing fits: {config.model.name} at {whole(seq_len)} tokens with Ulysses on {gpus} GPUs")
    options = step_options(preferred(ways).config)
    sizes = sorted({each.config.sp_size for each in ways if step_options(each.config) == options})
    ranks = placing.Ranks(gpus, -(-seq_len // sizes[0]), sizes[-1])
    cost, update_ms = _cost(fit, preferred(ways), cluster, ranks.held_tokens)
    return _compared(config.model.name, lengths, seq_len, ranks, sizes, cost, update_ms)


def of_kernels(cells: Sequence[Cell], lengths: str, besides_ms: float = 0.0) -> list[Policy]:
    """Each policy, by the kernels of one layer, of ranks that were measured as one of so many: no message is in it.

    cells: attention of packs whose documents have one length, with each group's share of the heads. besides_ms: of all
    else that is computed for a token of a rank.
    """
    seq_len, sizes = max(cell.asked["seq_len"] for cell in cells), sorted(_ranks_of(cells))
    ranks = placing.Ranks(sizes[-1], seq_len, sizes[-1])
    return _compared(cells[0].asked["model"], lengths, seq_len, ranks, sizes, cost_of_kernels(cells, besides_ms))


def padded_over_unpadded(cells: Sequence[Cell], lengths: str, besides_ms: float) -> float:
    """How many times as long documents take if each is padded to the longest: one at a time, over all ranks. cells,
    besides_ms: as in `of_kernels`."""
    longest, ranks, cost = (
        max(c.asked["seq_len"] for c in cells),
        max(_ranks_of(cells)),
        cost_of_kernels(cells, besides_ms),
    )
    several = islice(document_lengths(lengths, longest), PADDED)
    return cost(longest, ranks) / fmean(cost(min(rounded(length), longest), ranks) for length in several)


def cost_of_kernels(cells: Sequence[Cell], besides_ms: float) -> placing.Cost:
    """cells, besides_ms: as in `of_kernels`."""
    attention = attention_ms(cells)
    return cache(lambda length, ranks: attention(length, ranks) + besides_ms * length / ranks)


def attention_ms(cells: Sequence[Cell]) -> placing.Cost:
    """The time of a document's attention, forward and backward of one layer, on each of so many ranks. A token's time
    is linear between two measured lengths of documents, and that of the shortest below it."""
    of_ranks = {
        ranks: sorted((each.asked["document_len"] or each.asked["seq_len"], _of_token(each)) for each in of)
        for ranks, of in _ranks_of(cells).items()
    }

    def cost(length: int, ranks: int) -> float:
        lengths, token_ms = zip(*of_ranks[ranks], strict=True)
        return length * float(np.interp(length, lengths, token_ms))

    return cost


def besides_ms(fit: Fit, config: TrialConfig) -> float:
    """What one layer's share of a step takes for each token of a rank, beside attention and the update, by the fit."""
    works = works_of(config, (1, 1), Links({}))
    nothing = {kind: replace(work, flops=0.0, elements=0.0, blocks=0.0) for kind, work in works.items()}
    return pass_and_update_ms(config, nothing, fit.rates)[0] / config.seq_len / config.model.num_layers


def _of_token(cell: Cell) -> float:
    assert cell.median_step_ms is not None, "rows without times were left out"
    return cell.median_step_ms / cell.asked["seq_len"]


def _ranks_of(cells: Sequence[Cell]) -> dict[int, list[Cell]]:
    """The cells by the number of ranks that share all heads."""
    heads, found = max(cell.asked["num_heads"] for cell in cells), defaultdict(list)
    for cell in cells:
        found[heads // cell.asked["num_heads"]].append(cell)
    return found


def _compared(
    model: str,
    lengths: str,
    seq_len: int,
    ranks: placing.Ranks,
    sizes: Sequence[int],
    cost: placing.Cost,
    update_ms: float = 0.0,
) -> list[Policy]:
    """Each policy, over BATCHES batches of a sequence's tokens for each rank. sizes: of static groups."""
    gpus = ranks.number
    drawn_batches = [*islice(batches(document_lengths(lengths, seq_len), gpus * seq_len, seq_len), BATCHES)]
    filled = cache(lambda batch, filling: packs(batch, seq_len, filling))
    plans: dict[tuple[str, int | None], Callable[[tuple[int, ...]], Sequence[placing.Placed]]] = {}
    for size in sizes:
        plans["static, in turn", size] = lambda batch, size=size: placing.static(
            filled(batch, "first_fit"), ranks, size, cost, is_balanced=False
        )
        plans["static, balanced", size] = lambda batch, size=size: placing.static(
            filled(batch, "balanced"), ranks, size, cost, is_balanced=True
        )
    plans["per document", None] = lambda batch: placing.per_document(batch, ranks, cost)
    plans["dynamic", None] = lambda batch: placing.dynamic(batch, ranks, cost)
    ranks_ms = {
        name: [[ms + update_ms for ms in placing.loads(plan(batch), ranks, cost)] for batch in drawn_batches]
        for name, plan in plans.items()
    }
    bounds = [placing.lower_bound(batch, ranks, cost) + update_ms for batch in drawn_batches]
    batch_ms = {name: [*map(max, found)] for name, found in ranks_ms.items()}
    fastest = fmean(batch_ms["dynamic", None])
    return [
        Policy(
            model,
            lengths,
            gpus,
            seq_len,
            *name,
            fmean(batch_ms[name]),
            fmean(max(each) / fmean(each) for each in found),
            1e3 * seq_len / fmean(batch_ms[name]),
            fmean(batch_ms[name]) / fastest,
            max(ms / bound for ms, bound in zip(batch_ms[name], bounds, strict=True)),
        )
        for name, found in ranks_ms.items()
    ]


def _cost(fit: Fit, best: Candidate, cluster: Cluster, held: int) -> tuple[placing.Cost, float]:
    """(ms of a document on each of so many GPUs, ms of the update), with the options of `best`. held: tokens of a GPU
    at a time."""
    links = links_of(fit, cluster)

    def ms(length: int, ranks: int) -> tuple[float, float]:
        method = MethodConfig("single" if ranks == 1 else "ulysses")
        config = replace(best.config, method=method, sp_size=ranks, dp_shard_size=cluster.gpus // ranks, seq_len=length)
        share = length / ranks / held
        works = works_of(config, (ranks, 1), links)
        works = {kind: replace(work, blocks=work.blocks * share) for kind, work in works.items()}
        return pass_and_update_ms(config, works, fit.rates)

    return cache(lambda length, ranks: ms(length, ranks)[0]), ms(held, 1)[1]


def table(found: Sequence[Policy], width: int | None = None) -> str:
    """The policies. width: as of `text_table`."""
    heads = ("model", "lengths", "GPUs", "tokens", "policy", "GPUs of a document", "batch, s", "imbalance")
    heads += ("tokens/s/GPU", "over dynamic", "over the bound, worst")
    lines = [
        (
            each.model,
            each.lengths,
            whole(each.gpus),
            whole(each.seq_len),
            each.policy,
            "1 to all" if each.sp_size is None else whole(each.sp_size),
            number(each.batch_ms / 1e3),
            f"{each.imbalance:.2f}",
            whole(each.tokens_per_s_per_gpu),
            f"{each.over_dynamic:.2f}x",
            f"{each.over_bound:.2f}x",
        )
        for each in found
    ]
    left = ("left", "left", "right", "right", "left")
    return text_table(heads, lines, width, colalign=(*left, *["right"] * 6))


def as_json(each: Policy) -> dict[str, Any]:
    return {**asdict(each), "evidence": "projected", "batches": BATCHES, "seed": SEED}
