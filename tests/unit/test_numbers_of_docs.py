"""The results of README.md, docs/ANSWERS.md, docs/METHODS.md and docs/PACKING.md, held to the committed rows.

Each function computes the numbers of one line, or of a passage of README.md, with the report's own code and yields the
words that it must have. A number of an answer, or of what README.md says so far, that nobody yields fails too. The
commits of a line are not checked: rows that were measured in a copy of the tree name another one.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, combinations, pairwise, product, starmap
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import pytest

import sp_bench
from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.fabric_model import bandwidths
from sp_bench.analysis.limits import limits
from sp_bench.analysis.metrics import attention_tflops, memory_gib
from sp_bench.analysis.ratios import ranked, ratio_of_medians, ratio_of_pairs, times
from sp_bench.analysis.scaling import Scaling, scalings
from sp_bench.analysis.settings import CLOSE, SMALLEST, TIE, UNDECIDED, Difference, Place, settings
from sp_bench.analysis.signs import Count, counts
from sp_bench.attention.layouts import SequenceLayout, causal_pairs_of_ranks
from sp_bench.config.documents import documents
from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory
from sp_bench.formats import GIB, number, whole
from sp_bench.report import read

ROOT = Path(__file__).parents[2]
LONG, SHORT = {"seq_len": 131072}, {"seq_len": 32768}
FA4, FA2, CUDNN = {"kernel": "flash_attn_4"}, {"kernel": "flash_attn"}, {"kernel": "cudnn"}
KERNELS = (FA4, CUDNN, FA2)
GPUS = ("h100", "h200")
NEAR = (TIE, CLOSE, UNDECIDED)  # what lines by hand call a tie
THEIRS, SEGMENTS = "deepspeed_ulysses_hf", "expandable_segments"
PACKS, DRAWS = "h200x2_packed_2", "h200x2_packed_draws"
AROUND_4096, FEW_LONG = ({"packing": "lognormal", "document_len": length} for length in (4096, 1024))
STEPS = (("ulysses", "contiguous"), ("ring", "document_zigzag"), ("ring", "zigzag"), ("all_gather", "zigzag"))
QUANTITY = re.compile(r"\d[\d,.]*(?:x|%| ms| s | GiB| MFU| TFLOP| times)|\d\.\d|\[\d")

# Lines and numbers that no row gives, and why.
NOT_OF_ROWS = {
    "Who computes packed documents right": "verdicts without a number; their table in PACKING.md is written from rows",
}
BY_HAND = {
    "4.0.0b30": "rows have 4.0.0b29 and 4.0.0b36 only; the sources of FlashAttention-4 say which release was the first",
    "128 GiB of host memory a GPU": "rows do not say what a host has",
    "Llama-3.1-8B on one H200: 300K and 65K": "of files of Arctic Long Sequence Training, which PROJECTION.md names",
    "published 1.2M tokens ran on a host of 1.9 TB": "the same files",
    "which has 125.9 of its 128": "rows do not say it",
}

Words = Callable[[], Iterable[str]]
LINES: dict[str, Words] = {}  # how a line begins -> what it must say
ASKED: set[str] = set()  # of them, those of README.md whose every number must be of a row


def line(start: str, *, every_number: bool = False) -> Callable[[Words], Words]:
    def add(said: Words) -> Words:
        LINES[start] = said
        if every_number:
            ASKED.add(start)
        return said

    return add


# Cells of committed rows.


@cache
def campaign(name: str) -> Sequence[Cell]:
    return read([ROOT / "results" / name])


def is_asked(cell: Cell, asked: dict[str, Any]) -> bool:
    """By the names of columns, and of options that have no column."""
    known = {path.rpartition(".")[2]: value for path, value in cell.options.items()} | dict(cell.asked)
    return all(known[name] == value for name, value in asked.items())


def cell(name: str, method: str, **asked: Any) -> Cell:
    """The one measured cell of a campaign of which all this was asked."""
    found = [each for each in campaign(name) if each.ok and is_asked(each, {"method": method, **asked})]
    assert len(found) == 1, f"{name} has {len(found)} measured cells of {method} with {asked}"
    return found[0]


def pair(name: str, slow: str, fast: str, **asked: Any) -> Difference:
    """Of two methods of one campaign."""
    return Difference(cell(name, fast, **asked), cell(name, slow, **asked))


def time_over(over: Cell, under: Cell) -> float:
    """By the replicates that pair; by the medians of cells that ran on two machines, which the text then says."""
    found = ratio_of_pairs(over, under)
    return ratio_of_medians(over, under) if found is None else found


def cells_of(pairs: Iterable[Difference]) -> list[Cell]:
    return [each for pair in pairs for each in (pair.fast, pair.slow)]


def places(name: str, **asked: Any) -> list[Place]:
    return [each for setting in settings(campaign(name)) for each in setting.places if is_asked(each.first, asked)]


@cache
def every_cell() -> Sequence[Cell]:
    return read(sorted((ROOT / "results").iterdir()))


@cache
def over_campaigns() -> list[Count]:
    return counts(settings(every_cell()))


def ring_over_ulysses(**asked: Any) -> Count:
    asked |= {
        "workload": "attention",
        "pass_kind": "forward_backward",
        "fabric": "nvlink",
        "num_kv_heads": 8,
        "hardware": "h200",
    }
    (found,) = [each for each in over_campaigns() if each.rival == "ring" and is_asked(each.first, asked)]
    return found


def ends(name: str, method: str, allocator: str | None = None, **asked: Any) -> tuple[int, int]:
    """The longest that fits, and the shortest that does not."""
    asked |= {"method": method, "allocator": allocator}
    (found,) = limits([each for each in campaign(name) if is_asked(each, asked)])
    assert found.largest_ok is not None
    assert found.smallest_oom is not None
    return found.largest_ok.asked["seq_len"], found.smallest_oom.asked["seq_len"]


def written(found: tuple[int, int]) -> str:
    fits, fails = map(whole, found)
    return f"{fits}, not {fails}"


def times_as_many(found: tuple[int, int], than: tuple[int, int]) -> str:
    """From bracket to bracket."""
    return f"{found[0] / than[1]:.2f}x to {found[1] / than[0]:.2f}x"


def packs_of_one_gpu(name: str) -> list[Cell]:
    """The last one is a single document."""
    packings = (FEW_LONG, AROUND_4096, {"packing": "fixed"}, {"packing": "none"})
    return [cell(name, "single", **packing) for packing in packings]


class Draw:
    """One pack of `h200x2_packed_draws` with the methods that ran it. Each has one replicate."""

    def __init__(self, drawn: dict[str, Any], seed: int) -> None:
        asked = {**drawn, "seed": seed}
        self.cells = ranked([each for each in campaign(DRAWS) if each.ok and is_asked(each, asked)])
        (self.chunks,) = self.of("ulysses", head_chunks=4)
        lengths = documents("lognormal", 131072, drawn["document_len"], self.chunks.asked["document_sigma"], seed, ())
        pairs = causal_pairs_of_ranks(SequenceLayout("zigzag", 2), lengths)
        self.imbalance = max(pairs) / mean(pairs)

    def of(self, method: str, **asked: Any) -> list[Cell]:
        """One, or none that was measured."""
        return [each for each in self.cells if is_asked(each, {"method": method, **asked})]

    def over_chunks(self, method: str, **asked: Any) -> list[float]:
        return [time_over(each, self.chunks) for each in self.of(method, **asked)]


@cache
def draws(document_len: int) -> list[Draw]:
    drawn = next(each for each in (AROUND_4096, FEW_LONG) if each["document_len"] == document_len)
    return [Draw(drawn, seed) for seed in range(1, 9)]


def zigzag_rings() -> list[float]:
    """By pack of both kinds: their time over that of Ulysses in 4 chunks."""
    return [each for pack in draws(4096) + draws(1024) for each in pack.over_chunks("ring", layout="zigzag")]


def behind_fastest(packs: Iterable[Draw]) -> list[float]:
    """Of Ulysses in 4 chunks, by pack: by how much it is slower than the fastest."""
    return [time_over(pack.chunks, pack.cells[0]) - 1 for pack in packs]


@cache
def imbalances(ranks: int, seq_len: int, median_len: int, sigma: float) -> list[float]:
    """Of zigzag, over the packs of seeds 0 to 999: the pairs of the rank that has most, over the mean."""
    found = []
    for seed in range(1000):
        lengths = documents("lognormal", seq_len, median_len, sigma, seed, ())
        pairs = causal_pairs_of_ranks(SequenceLayout("zigzag", ranks), lengths)
        found.append(max(pairs) / mean(pairs))
    return found


def share_as_even(ranks: int, median_len: int, sigma: float, imbalance: float) -> float:
    packs = imbalances(ranks, 131072, median_len, sigma)
    return sum(each <= imbalance for each in packs) / len(packs)


def of_one(pack: Cell, one: Cell) -> tuple[float, float]:
    """Model FLOPs and step time of a pack, of those of one document."""
    work = (pack.middle("model_flops") or 0) / (one.middle("model_flops") or 1)
    return work, time_over(pack, one)


# Numbers as the pages write them.


def ratio(slow: Cell, fast: Cell) -> str:
    """1.15x [1.14, 1.16]; without brackets where fewer than 6 replicates pair."""
    found = Difference(fast, slow)
    return times(time_over(slow, fast)) if found.ratio is None else found.words


def span(values: Iterable[float], digits: int = 2) -> str:
    shown = [f"{value:.{digits}f}x" for value in sorted(values)]
    first, last = shown[0], shown[-1]
    return first if first == last else f"{first} to {last}"


def within(*cells: Cell) -> str:
    times = [each.median_step_ms or 0 for each in cells]
    return f"within {math.ceil(100 * (max(times) / min(times) - 1))}%"


def lead(over_ulysses: Count) -> str:
    low, *_, high = sorted(over_ulysses.ratios.values())
    return f"{100 * low - 100:.0f} to {100 * high - 100:.0f}%"


def ms(cell: Cell) -> str:
    return whole(cell.median_step_ms)


def gib(cell: Cell) -> str:
    return f"{memory_gib(cell) or 0:.1f}"


def seconds(cell: Cell) -> str:
    return f"{whole((cell.median_step_ms or 0) / 1e3)} s"


def shared(texts: Iterable[str]) -> str:
    different = sorted(set(texts))
    assert len(different) == 1, f"the page has one of {different} for all"
    return different[0]


def replicates(*cells: Cell) -> str:
    numbers = [len(each.step_ms) for each in cells]
    low, high = min(numbers), max(numbers)
    return f"{low} to {high} replicates" if low < high else "one replicate" if low == 1 else f"{low} replicates"


def spread(cell: Cell) -> float:
    """Of the slowest replicate over the fastest."""
    return max(cell.step_ms.values()) / min(cell.step_ms.values()) - 1


def of_rows(flag: str, *cells: Cell) -> str:
    """2 of 6."""
    flags = [row["flags"] for each in cells for row in each.rows]
    return f"{sum(flag in each for each in flags)} of {len(flags)}"


# The lines.


@line("- Long shards on NVLink: it hardly matters.", every_number=True)
def attention_alone() -> Iterator[str]:
    _, ulysses, ring, _ = cells_of_headline()
    assert Difference(ulysses, ring).outcome in NEAR
    yield f"and {whole(LONG['seq_len'])} tokens, Ulysses and the ring tie on 2 GPUs on FlashAttention-4"
    yield f"on cuDNN the ring is {ring_on_cudnn()[0]} as fast"
    on_fa4, on_cudnn = (ring_over_ulysses(sp_size=4, **LONG, **kernel) for kernel in (FA4, CUDNN))
    rings = span(on_cudnn.ratios.values(), 3)
    yield f"On 4, Ulysses is {lead(on_fa4)} faster on FlashAttention-4, and on cuDNN the ring takes {rings} as long"
    asked, *_ = short_shards_on_4()
    yield f"({whole(asked['seq_len'] // asked['sp_size'])} tokens a GPU, {asked['sp_size']} GPUs)"
    yield f"On FlashAttention-4 it is {over_short_shards()[0]} as fast as the others, in rows that are not flagged"
    slow = [each for name in ("h200x2_fabrics", "h200x4_fabrics", "h200x4_fabrics_2") for each in campaign(name)]
    yield f"({replicates(*(each for each in slow if each.ok))} in each campaign)"
    over_chunks, _ = rings_over_chunks()
    over_ulysses = f"{over_chunks} as fast at 131,072 tokens as Ulysses in 4 chunks of heads"
    yield f"On 2 GPUs over {rates_of_slower_fabrics()} the ring is {over_ulysses}"
    channels, of_host = ("channels_1", "channels_2"), ("shm",)
    on_channels = span(1 / each for each in slower_on_four(8, channels))
    yield f"the ring is {on_channels} as fast on 1 or 2 NCCL channels as Ulysses in one exchange"
    many = span(slower_on_four(32, (*channels, *of_host)))
    yield f"With 32/32 heads, there and through host memory, Ulysses is {many} as fast as the ring"
    assert min(over_sockets(length, 8) for length in (LONG, SHORT)) > 1
    assert {each.leader.asked["method"] for each in on_four("socket", 8)} == {"all_gather"}
    yield "Over TCP sockets with 32/8 heads the all-gather is the fastest"
    packs, rings = draws(4096) + draws(1024), zigzag_rings()
    behind = f"within {max(behind_fastest(packs)):.1%} of it"
    yield f"Over {len(packs)} packs, in {replicates(*campaign(DRAWS))}, it is the fastest, or {behind}"
    yield f"The zigzag ring takes {times(min(rings))} to {times(max(rings))} as long"
    yield within_fastest()
    assert tie_of_rings()
    yield f"TransformerEngine's ring is {ring_behind()}: a tie"
    far = far_behind()
    gather, llama = (
        max(far[key].values())
        for key in (("transformer_engine", "all_gather", "cudnn"), ("ring_flash_attn_llama3", None, "flash_attn"))
    )
    yield f"all-gather takes up to {gather:.2f}x as long on cuDNN, and ring-flash-attn's `llama3` up to {llama:.2f}x"


@line("- 2 GPUs: a tie.", every_number=True)
def whole_steps() -> Iterator[str]:
    steps = [full_steps(each) for name, each in FULL_STEPS.items() if not ("`full`" in name or "Llama" in name)]
    cells = [each for of_one in steps for each in of_one]
    assert {(each.options["workload.activation_checkpointing"], each.asked["model"]) for each in cells} == {
        ("selective", "qwen3_4b")
    }
    lengths = [each.asked["seq_len"] for each in cells]
    behind = f"within {most_behind(steps)} from {whole(min(lengths))} to {whole(max(lengths))} tokens"
    yield f"Ulysses, the ring and the all-gather are {behind}, at up to {max(each.mfu or 0 for each in cells):.2f} MFU"
    yield f"(model FLOPs over the GPUs' peak; {replicates(*cells)})"
    ours, published, best = ([at(n) for n in (32768, 65536)] for at in (kept_on_4, published_on_4, best_on_4))
    replicated = shared(replicates(kept_on_4(n), kept_on_4(n, "ring")) for n in (32768, 65536))
    yield f"tie at 32,768 and 65,536 tokens ({replicated})"
    in_one = replicates(kept_on_4(131072), kept_on_4(131072, "ring"))
    yield f"At 131,072 Ulysses leads {by_over_the_ring_on_4()} in {in_one}"
    yield f"It reaches up to {max(kept_on_4(each).mfu or 0.0 for each in ON_4):.2f} MFU"
    over_published, over_best = (
        " and ".join(ratio(*each) for each in zip(theirs, ours, strict=True)) for theirs in (published, best)
    )
    yield f"At 32,768 and 65,536 tokens our step is {over_published} as fast as that of `hf_deepspeed`"
    yield f"at its published settings ({replicates(*ours, *published)} each)"
    (of_best,) = {len(each.step_ms) for each in best}
    of_each = f"({len(ours[0].step_ms)} of ours, {of_best} of theirs)"
    yield f"and {over_best} as fast as that on cuDNN with Liger's kernels and the loss in tiles {of_each}"
    (none, megatron_none), _, theirs = stacks_on_one_kernel()
    assert Difference(none, megatron_none).outcome in NEAR
    yield f"step takes {times(time_over(megatron_none, none))} as long as ours and holds {gib(megatron_none)} against"
    yield f"{gib(none)} GiB a GPU ({replicates(none, megatron_none)})"
    _, alike, (megatron, *others) = best_of_stacks()
    _, alike_again, others_again = stacks_again()
    behind = f"{ratio(megatron, alike)} as long as ours, which keeps attention ({replicates(alike, megatron)})"
    yield f"With whole layers recomputed it takes {behind}"
    deepspeed, fsdp2 = (ratio(each, none) for each in theirs)
    of_each = f"{deepspeed} as fast as `hf_deepspeed` and {fsdp2} as fast as `hf_fsdp2` ({replicates(none, *theirs)})"
    yield f"ours recomputes nothing, and is {of_each}"
    assert {each.asked["engine"] for each in others} == {"trl_sft", "hf_deepspeed", "hf_fsdp2"}
    on_h100s = span(time_over(e, own) for own, found in ((alike, others), (alike_again, others_again)) for e in found)
    yield f"On H100s ours keeps attention, and is {on_h100s} as fast as `hf_deepspeed`, `hf_fsdp2` and `trl_sft`"
    assert replicates(alike, alike_again, *others, *others_again) == "1 to 2 replicates"
    net, *others = ([each.cell for each in found] for found in net_of_baselines())
    hugging_face = [each for found in others for each in found if each.asked["engine"] != "megatron"]
    of_one = [(each, own) for each in hugging_face for own in net if each.rows[0]["folder"] == own.rows[0]["folder"]]
    assert len(of_one) == len(hugging_face) == 6
    as_much = f"{span(starmap(time_over, of_one))} as fast as the first two"
    yield f"With as much recomputed ours is {as_much} (H200s, one replicate on each of two hosts)"
    assert {len(each.step_ms) for pair in of_one for each in pair} == {1}


@line("- Longest sequence of Qwen3-4B in 79.6 GiB a GPU", every_number=True)
def memory_of_a_step() -> Iterator[str]:
    names = ("h200x2_longest", "h200x2_longest_3", "h200x4_longest", "h200x4_longest_2")
    yield f"in {shared(str(each.asked['device_memory_gib']) for name in names for each in campaign(name))} GiB a GPU"
    of_4 = partial(ends, "h200x4_longest_2")
    ours = [whole(of_4(method, SEGMENTS)[0]) for method in ("upipe", "ulysses", "ring", "all_gather")]
    yield "On 4 GPUs it fits {} tokens, Ulysses {}, the ring {}, and the all-gather {}".format(*ours)
    best, published = (whole(of_4(THEIRS, allocator)[0]) for allocator in (SEGMENTS, None))
    yield f"fits {best} at its best, and {published} at its published settings"
    ulysses, upipe = steps_of_upipe()
    took = f"{ratio(upipe, ulysses)} as long as one of Ulysses (2 GPUs, {whole(upipe.asked['seq_len'])} tokens)"
    yield f"A whole step of UPipe takes {took}"
    (fits,) = campaign("h200x4_longest")
    yield f"Ulysses fits at least {whole(fits.asked['seq_len'])} tokens on {fits.asked['sp_size']} GPUs"
    none, kept, full = (whole(whole_mlp("ulysses", each)[0]) for each in ("none", "selective", "full"))
    yield f"fits {none} tokens with nothing recomputed, {kept} with all but attention, and {full} with whole layers"
    plain, segments = (whole(ends("h200x2_longest", "ulysses", each)[0]) for each in (None, SEGMENTS))
    yield f"With the MLP in tiles, too, it fits {segments}"
    yield f"on its default settings the last is {plain}"


@line("8 GPUs and several hosts are not measured.")
def not_measured() -> Iterator[str]:
    rows = [row for each in every_cell() for row in each.rows if row["hardware"] in GPUS]
    assert {row["num_nodes"] for row in rows} == {1}
    yield f"No row tests more than {max(row['world_size'] for row in rows)} GPUs"


@line("*Attention forward and backward on 2 H200s")
def figure_by_fabric() -> Iterator[str]:
    of_nvlink, of_host = (
        {(p.first.asked["seq_len"], p.first.asked["num_kv_heads"]): p.of_kind("ring") or p.leader for p in found}
        for found in (places("h200x2_fabrics", fabric=name) for name in ("nvlink", "shm"))
    )
    saved = [100 - 100 * time_over(of_host[where], ring) for where, ring in of_nvlink.items()]
    assert len(saved) == 3
    assert {each.asked["method"] for each in (*of_nvlink.values(), *of_host.values())} == {"ring"}
    said = f"by {min(saved):.1f}% to {max(saved):.1f}%"
    yield f"In all three places the ring took less time over host memory than over NVLink, {said}"
    yield replicates(*of_nvlink.values(), *of_host.values())


def on_four(fabric: str, num_kv_heads: int, **asked: Any) -> list[Place]:
    """Attention on 4 GPUs, one place of each campaign and length."""
    asked |= {"fabric": fabric, "num_kv_heads": num_kv_heads}
    return [each for name in ("h200x4_fabrics", "h200x4_fabrics_2") for each in places(name, **asked)]


def slower_on_four(num_kv_heads: int, fabrics: Sequence[str], **asked: Any) -> list[float]:
    """How many times as fast as the ring Ulysses is on 4 GPUs, by campaigns."""
    asked |= {"workload": "attention", "pass_kind": "forward_backward", "sp_size": 4, "num_kv_heads": num_kv_heads}
    found = [each for each in over_campaigns() if each.rival == "ring" and is_asked(each.first, asked)]
    return [ratio for each in found if each.first.asked["fabric"] in fabrics for ratio in each.ratios.values()]


def ring_on_cudnn() -> tuple[str, int]:
    """How many times as fast as Ulysses it is on 2 GPUs, and in how many campaigns."""
    found = [1 / each for each in ring_over_ulysses(sp_size=2, **LONG, **CUDNN).ratios.values()]
    return span(found, 3), len(found)


def cells_of_headline() -> list[Cell]:
    """The kernel alone, Ulysses, the ring's fastest variant and the all-gather, on FlashAttention-4."""
    name = "h200x2_headline"
    ring = cell(name, "ring", exchange="copy_engines")
    return [cell(name, "single"), cell(name, "ulysses", head_chunks=1), ring, cell(name, "all_gather")]


@line("NVLink, 2 GPUs, 131,072 tokens")
def two_gpus() -> Iterator[str]:
    alone, *cells = cells_of_headline()
    yield f"Ulysses, the zigzag ring and the all-gather are {within(*cells)}"
    shares = sorted(Difference(each, alone).ratio for each in cells)
    yield f"Each reaches {shares[0]:.2f} to {shares[-1]:.2f} of the speed of the kernel alone"
    yield f"FlashAttention-4, {replicates(*cells, alone)}"
    yield "the ring is {} as fast as Ulysses in {} campaigns".format(*ring_on_cudnn())
    best = pair("h200x2_libraries_2", "ulysses", "ring", **CUDNN)
    yield f"by {best.words} in the one that has {replicates(best.slow, best.fast)}"
    yield f"cuDNN: {replicates(best.slow, best.fast)} 6b63d51, the others one each"
    of_h100 = cell("h100x2_libraries", "ulysses", **FA4, head_chunks=1), cell("h100x2_libraries", "ring", **FA4)
    on_cudnn = cell("h100x2_libraries", "ulysses", **CUDNN), cell("h100x2_libraries", "ring", **CUDNN)
    yield f"on H100s it is {ratio(*on_cudnn)} on cuDNN and {ratio(*of_h100)} on FlashAttention-4 too"
    yield f"on H100s {replicates(*of_h100, *on_cudnn)}"


@line("A whole training step, 2 GPUs")
def training_step() -> Iterator[str]:
    def three(name: str, **asked: Any) -> list[Cell]:
        return [cell(name, method, **asked) for method in ("ulysses", "ring", "all_gather")]

    short, long = (three("h200x2_train_step", seq_len=seq_len, **FA4) for seq_len in (16384, 32768))
    yield f"A tie {shared([within(*short), within(*long)])}"
    yield f"the ring is ahead of Ulysses by {ratio(*short[:2])} at 16,384 tokens and by {ratio(*long[:2])} at 32,768"
    yield f"{replicates(*short, *long)}, a56c161"
    ulysses, ring, gather = compiled = three("h200x2_step_methods_2")
    yield f"the ring is ahead of Ulysses by {ratio(ulysses, ring)} and of the all-gather by {ratio(gather, ring)}"
    yield f"at 32,768 tokens and {shared(f'{each.mfu:.2f}' for each in compiled)} MFU"
    longer, shorter = three("h200x2_step_methods_3"), three("h200x2_step_methods_4", seq_len=16384)
    mfu, how_near = shared(f"{each.mfu:.2f}" for each in longer), shared(starmap(within, (longer, shorter)))
    yield f"at 16,384 and at 65,536, there at {mfu} MFU, the three are {how_near}"
    of_long = full_steps(FULL_STEPS["Qwen3-4B, 131,072, `selective`"])
    on_other = full_steps(FULL_STEPS["the same, another machine"])
    assert [each.asked["method"] for each in of_long + on_other] == ["ring", "ulysses", "all_gather", "ulysses"]
    how_near, mfu = shared(starmap(within, (of_long, on_other))), shared(f"{each.mfu:.2f}" for each in of_long)
    yield f"At 131,072 tokens Ulysses is {how_near} of the ring, at {mfu} MFU, and on another machine of the all-gather"
    llama = [full_steps(FULL_STEPS[f"Llama-3-8B, 32,768, `{kept}`"]) for kept in ("selective", "full")]
    yield f"With Llama-3-8B at 32,768 tokens the three are {shared(starmap(within, llama))}, too"
    recomputed = [full_steps(each) for name, each in FULL_STEPS.items() if "`full`" in name]
    where = "Where all is recomputed, at 32,768 and 65,536 tokens and with Llama-3-8B"
    yield f"{where}, they are within {most_behind(recomputed)}"
    of_qwen = replicates(*(each for of_one in recomputed[:2] for each in of_one)).removesuffix(" replicates")
    yield f"Qwen3-4B with all recomputed {of_qwen}, ef11054"
    yield f"Ulysses keeps one output more: {gib(longer[0])} against {gib(longer[1])} GiB at 65,536 tokens"
    alone = cell("h200x2_step_long_2", "ulysses", seq_len=98304, head_chunks=None)
    yield f"Ulysses reaches {alone.mfu:.2f} MFU at 98,304 tokens"
    number, numbers = len(longer[0].step_ms), replicates(*shorter).removesuffix(" replicates")
    yield f"compiled at 32,768 tokens {len(ring.step_ms)}, c41ca99, at 65,536 {number}, 7681aa8, at 16,384 {numbers}"
    yield f"and beyond {replicates(alone, *of_long, *on_other).removesuffix(' replicate')}, e0fa77d and 81d41be"
    yield f"Llama-3-8B {replicates(*llama[0], *llama[1]).removesuffix(' replicates')}, 8d4b317"
    fitted = [[cell("h200x2_fit_2", m, seq_len=n) for m in ("ring", "ulysses")] for n in (32768, 65536, 98304, 131072)]
    short_fitted = fitted.pop(0)
    yield f"the ring is ahead of Ulysses by {ratio(*reversed(short_fitted))} at 32,768 tokens, in one step of each"
    yield f"but for one single step ({ratio(*reversed(short_fitted))})"
    yield f"From 65,536 to 131,072 tokens they are {shared(within(*each) for each in fitted)}, "
    yield f"there at {shared(f'{each.mfu:.2f}' for each in fitted[-1])} MFU"


# Whole steps on 4 H200s, with attention kept, and of `hf_deepspeed`.
STEPS_ON_4, ON_4 = "h200x4_step_methods_2", (32768, 65536, 98304, 131072)
REPLICATED_ON_4 = {32768: "h200x4_step_methods_4", 65536: "h200x4_step_methods_3"}  # these lengths again
SLOW_ON_4 = "h200x4_step_methods"  # one of its GPUs was slow


def kept_on_4(seq_len: int, method: str = "ulysses") -> Cell:
    return cell(of_steps_on_4(seq_len), method, seq_len=seq_len, activation_checkpointing="selective")


def kept_alone() -> Cell:
    """At 65,536 tokens in the campaign of one replicate."""
    return cell(STEPS_ON_4, "ulysses", seq_len=65536, activation_checkpointing="selective")


def of_steps_on_4(seq_len: int) -> str:
    """The campaign with most replicates of this length."""
    return REPLICATED_ON_4.get(seq_len, STEPS_ON_4)


def ring_over_ulysses_of(name: str, seq_len: int, **asked: Any) -> float:
    """How many times as long the ring takes in a campaign."""
    return time_over(*(cell(name, each, seq_len=seq_len, **asked) for each in ("ring", "ulysses")))


def rings_on_4() -> list[float]:
    return [ring_over_ulysses_of(of_steps_on_4(each), each, activation_checkpointing="selective") for each in ON_4]


def by_over_the_ring_on_4() -> str:
    """What of the ring's ratios is no tie: at the longest."""
    *ties, last = rings_on_4()
    assert max(ties) < 1.02 < last
    return f"by {100 * last - 100:.0f}%"


@line("A whole training step, 4 GPUs")
def training_step_on_4() -> Iterator[str]:
    yield f"Ulysses, {by_over_the_ring_on_4()} at 131,072 tokens; a tie below"
    *_, third, last = (f"{each:.3f}x" for each in rings_on_4())
    replicated = [pair(each, "ring", "ulysses") for each in REPLICATED_ON_4.values()]
    at_32768, at_65536 = (each.words for each in replicated)
    yield f"The ring takes {at_32768} as long at 32,768 tokens and {at_65536} at 65,536"
    yield f"At 98,304 it takes {third} as long, and at 131,072 {last}"
    slow = [ring_over_ulysses_of(SLOW_ON_4, each, activation_checkpointing="selective") for each in ON_4[:2]]
    yield f"one slow GPU the ring takes {slow[0]:.3f}x as long at 32,768 tokens and {slow[1]:.3f}x at 65,536"
    older = [ring_over_ulysses_of("h200x4_train_step", each, model="qwen3_4b") for each in (32768, 131072)]
    yield f"it takes {older[0]:.3f}x as long at 32,768 tokens and {older[1]:.3f}x at 131,072"
    longest, ring = kept_on_4(131072), kept_on_4(131072, "ring")
    yield f"where Ulysses takes {ms(longest)} ms"
    mfu = [f"{kept_on_4(each).mfu:.2f}" for each in ON_4]
    yield "reaches {} MFU at 32,768 tokens, {} at 65,536, {} at 98,304 and {} at 131,072".format(*mfu)
    yield f"{gib(longest)} against {gib(ring)} GiB at 131,072"
    plain = [cell(STEPS_ON_4, "ulysses", seq_len=each, activation_checkpointing="none") for each in ON_4[:2]]
    yield f"{plain[0].mfu:.2f} MFU at 32,768 tokens and {plain[1].mfu:.2f} at 65,536"
    yield f"({ms(plain[1])} ms, {gib(plain[1])} GiB)"
    even = (STEPS_ON_4, *REPLICATED_ON_4.values())
    assert not any("uneven_devices" in each.flags for name in even for each in campaign(name))
    yield f"32,768 and 65,536 tokens have {replicates(*cells_of(replicated))}, 2c5f28e and f1d4113"
    others = replicates(*plain, *campaign(STEPS_ON_4))
    yield f"The other lengths, and steps with nothing recomputed, have {others}, 817eb16"


@line("Our step and Hugging Face's, 2 GPUs")
def hugging_face() -> Iterator[str]:
    name = "h200x2_step_options"
    theirs, alike = cell(name, "deepspeed_ulysses_hf"), cell(name, "ulysses", **FA2)
    ours = cell(name, "ulysses", activation_checkpointing="selective_mlp")
    yield f"Ours, by {ratio(theirs, ours)} at 32,768 tokens over `hf_deepspeed` at its published settings"
    yield f"{ms(ours)} against {ms(theirs)} ms"
    yield f"On its kernel and recomputing all, ours is {ratio(theirs, alike)} as fast"
    yield f"Ulysses, {replicates(ours, theirs, alike)}"
    best, kept = cell("h200x2_theirs_best", "deepspeed_ulysses_hf"), cell("h200x2_step_methods_2", "ulysses")
    yield f"By {ratio(best, kept)} over the fastest of its settings that were tried"
    yield f"it takes {ms(best)} ms, where ours takes {ms(kept)} on FlashAttention-4 with attention kept"
    yield f"it should fit, too ({memory.peak(not_recomputed(best)).bytes / GIB:.0f} GiB by the memory model, which"
    published, best_64k = (
        cell("h200x2_theirs_64k", "deepspeed_ulysses_hf", model_code=code) for code in ("eager", "liger")
    )
    longer = best_64k, cell("h200x2_step_methods_3", "ulysses")
    yield f"At 65,536 tokens by {ratio(*longer)} ({ms(longer[1])} against {ms(longer[0])} ms)"
    yield f"over its published settings by {ratio(published, longer[1])} ({ms(published)} ms, on another machine)"
    yield f"its fastest settings one at each length, beside {len(kept.step_ms)} and {len(longer[1].step_ms)} of ours"


def published_on_4(seq_len: int) -> Cell:
    return cell(of_steps_on_4(seq_len), THEIRS, seq_len=seq_len, **FA2)


def best_on_4(seq_len: int) -> Cell:
    return cell(of_steps_on_4(seq_len), THEIRS, seq_len=seq_len, **CUDNN)


@line("The same on 4 H200s")
def hugging_face_on_4() -> Iterator[str]:
    short, middle, long, longest = map(kept_on_4, ON_4)
    published = [published_on_4(each) for each in ON_4[:3]]
    yield f"Ours, by {ratio(published[1], middle)} at 65,536 tokens over `hf_deepspeed` at its published settings"
    yield f"{ms(middle)} against {ms(published[1])} ms"
    yield f"At 32,768 tokens by {ratio(published[0], short)} ({ms(short)} against {ms(published[0])} ms)"
    yield f"at 98,304 by {ratio(published[2], long)} ({ms(long)} against {ms(published[2])} ms)"
    assert {*published[0].flags} == {"transient", "unsettled"}
    without = [f"{memory.peak(not_recomputed(best_on_4(each))).bytes / GIB:.0f}" for each in ON_4[:3]]
    assert ON_4[:3] == (32768, 65536, 98304)
    yield "in {}, {} and {} GiB at 32,768, 65,536 and 98,304 tokens".format(*without)
    alone = cell(STEPS_ON_4, THEIRS, seq_len=65536, **FA2), kept_alone()
    yield f"On another machine, in {replicates(*alone)}, it is {ratio(*alone)}"
    best = [best_on_4(each) for each in ON_4]
    tried = f"over the fastest of its settings that were tried at 65,536 tokens ({ms(best[1])} ms)"
    yield f"By {ratio(best[1], middle)} {tried}"
    yield f"by {ratio(best[0], short)} at 32,768 ({ms(best[0])} ms)"
    yield f"by {ratio(best[2], long)} at 98,304 ({ms(best[2])} ms)"
    yield f"by {ratio(best[3], longest)} at 131,072 ({ms(longest)} against {ms(best[3])} ms)"
    of_best = shared(f"{len(each.step_ms)} of its fastest settings" for each in best[:2])
    of_both = replicates(short, middle, *published[:2])
    yield f"32,768 and 65,536 tokens have {of_both}, {of_best}, 2c5f28e and f1d4113"
    yield f"The other lengths have {replicates(*campaign(STEPS_ON_4))}, 817eb16"
    assert all("uneven_devices" in each.flags for each in campaign(SLOW_ON_4))
    kept = [cell(SLOW_ON_4, "ulysses", seq_len=each, activation_checkpointing="selective") for each in ON_4[:2]]
    behind = [ratio(cell(SLOW_ON_4, THEIRS, seq_len=each.asked["seq_len"]), each) for each in kept]
    yield f"with one slow GPU, ours leads by {behind[1]} at 65,536 tokens and by {behind[0]} at 32,768"
    limits_ms = [row["limit_ms"] for each in campaign(SLOW_ON_4) for row in each.rows]
    slower = span([max(each) / median(each) for each in limits_ms], 1)
    yield f"The kernels alone of that GPU take {slower} as long as the median GPU's"


@line("Engines where nothing is sent, 1 GPU, 16,384 tokens")
def engines() -> Iterator[str]:
    name = "h200x1_engines"
    ours = cell(name, "single", engine="fsdp2", model_code="compiled")
    megatron, theirs = (cell(name, "single", engine=engine, **CUDNN) for engine in ("megatron", "hf_deepspeed"))
    yield f"Ours, by {ratio(megatron, ours)} over Megatron with less recomputed"
    yield f"by {ratio(theirs, ours)} over `hf_deepspeed`"
    yield f"{ms(ours)} against {ms(megatron)} and {ms(theirs)} ms"
    not_recomputed = {"engine": "megatron", "activation_checkpointing": "none"}
    assert [each.statuses for each in campaign(name) if is_asked(each, not_recomputed)] == [["oom"]]
    yield "Megatron without that runs out of memory"
    recomputed = {"model_code": "compiled", "activation_checkpointing": "full", "seq_len": 16384}
    last = cell("h200x1_step_options", "single", **recomputed)
    yield f"by {time_over(megatron, last):.2f}x with as much"
    yield f"Compiled and with whole layers recomputed ours takes {ms(last)} ms"
    yield f"{replicates(ours, megatron, theirs)}, f34d27a; the last {len(last.step_ms)}"


@line("Whole steps of five stacks, each at its best, 2 H100s, 32,768 tokens")
def stacks() -> Iterator[str]:
    best, alike, theirs = best_of_stacks()
    first, *both, last = (ratio(each, best) for each in theirs)
    yield f"Ours, by {first} over Megatron with TransformerEngine's ring"
    yield f"{shared(both)} over `trl_sft` and `hf_deepspeed`, and {last} over `hf_fsdp2`"
    yield f"{ms(best)} against {', '.join(map(ms, theirs[:-1]))} and {ms(theirs[-1])} ms"
    first, *both, last = (ratio(each, alike) for each in theirs)
    yield f"On cuDNN, which theirs ran on, ours takes {ms(alike)} ms: it leads by {first}, {shared(both)} and {last}"
    (trl,), (deepspeed,) = ([row["step_ms"] for row in each.measured] for each in theirs[1:3])
    yield f"The steps of `trl_sft` took {whole(min(trl))} to {whole(max(trl))} ms"
    yield f"those of `hf_deepspeed` {whole(min(deepspeed))} to {whole(max(deepspeed))}; both rows are flagged"
    assert all("transient" in each.flags for each in theirs[1:3])
    again, alike_again, (deepspeed_again, fsdp2_again) = stacks_again()
    over = (f"{ratio(each, again)} over `hf_{name}` ({ms(each)} ms)"
            for name, each in (("deepspeed", deepspeed_again), ("fsdp2", fsdp2_again)))  # fmt: skip
    yield f"On a second machine ours takes {ms(again)} ms and leads by {' and '.join(over)}"
    on_theirs = " and ".join(ratio(each, alike_again) for each in (deepspeed_again, fsdp2_again))
    yield f"On cuDNN it takes {ms(alike_again)} ms and leads by {on_theirs}"
    assert not any(each.flags for each in (again, alike_again, deepspeed_again, fsdp2_again))
    yield f"on the second machine {replicates(again, alike_again, deepspeed_again, fsdp2_again)}, no flags"
    selective = {"engine": "megatron", "activation_checkpointing": "selective"}
    assert [each.statuses for each in campaign("h100x2_engines") if is_asked(each, selective)] == [["oom"], ["oom"]]
    yield "Megatron's own selective recomputation ran out of memory"
    yield f"ours {replicates(best, alike)}, theirs {replicates(*theirs).removesuffix(' replicate')}"


def best_of_stacks() -> tuple[Cell, Cell, list[Cell]]:
    """Ours, ours on cuDNN, and theirs on that: Megatron's, TRL's, DeepSpeed's and FSDP2's."""
    best, alike, theirs = of_stacks("h100x2_engines", {"variant": "p2p"}, "allgather")
    assert {each.options["workload.activation_checkpointing"] for each in theirs} == {"full"}
    return best, alike, theirs


def stacks_again() -> tuple[Cell, Cell, list[Cell]]:
    """Ours, ours on cuDNN, and DeepSpeed's and FSDP2's on that, on the second machine."""
    name = "h100x2_engines_2"
    best, alike = (cell(name, "ulysses", **kernel) for kernel in (FA4, CUDNN))
    return best, alike, [cell(name, THEIRS), cell(name, "torch_context_parallel", variant="allgather")]


def of_stacks(name: str, megatron: dict[str, str], variant: str) -> tuple[Cell, Cell, list[Cell]]:
    """As `best_of_stacks`. variant: of FSDP2's context parallelism."""
    best, alike = (cell(name, "ulysses", **kernel) for kernel in (FA4, CUDNN))
    asked = ({"engine": "megatron"} | megatron, {"engine": "trl_sft"}, {"engine": "hf_deepspeed"})
    with_fsdp2 = {"engine": "hf_fsdp2", "variant": variant}
    theirs = [next(c for c in campaign(name) if c.ok and is_asked(c, each)) for each in (*asked, with_fsdp2)]
    return best, alike, theirs


def stacks_with_room() -> tuple[Cell, Cell, list[Cell]]:
    """As `best_of_stacks`, where Megatron has the memory to keep attention."""
    return of_stacks("h200x2_engines", {"variant": "a2a", "activation_checkpointing": "selective"}, "alltoall")


def stacks_on_one_kernel() -> tuple[tuple[Cell, Cell], tuple[Cell, Cell], list[Cell]]:
    """All on cuDNN: ours and Megatron's with nothing recomputed; ours with attention kept and Megatron's without its
    MLPs; and Hugging Face's two, which recompute whole layers."""
    name = "h200x2_engines_3"
    none, selective = (
        (cell(name, "ulysses", **asked), cell(name, "transformer_engine", **asked))
        for asked in ({"activation_checkpointing": each} for each in ("none", "selective"))
    )
    return none, selective, [cell(name, method) for method in (THEIRS, "torch_context_parallel")]


@line("Whole steps of four stacks on cuDNN, 2 H200s, 32,768 tokens")
def stacks_at_32768() -> Iterator[str]:
    (none, megatron_none), (kept, megatron_kept), theirs = stacks_on_one_kernel()
    assert Difference(none, megatron_none).outcome == Difference(kept, megatron_kept).outcome in NEAR
    yield f"where nothing is recomputed: {ms(megatron_none)} against {ms(none)} ms"
    yield f"It holds {gib(megatron_none)} GiB a GPU, ours {gib(none)}"
    yield f"Where its MLPs are recomputed, and ours recomputes all but attention, it takes {ms(megatron_kept)} ms and"
    yield f"{gib(megatron_kept)} GiB, and ours {ms(kept)} ms and {gib(kept)} GiB"
    deepspeed, fsdp2 = theirs
    yield f"by {ratio(deepspeed, none)} over `hf_deepspeed` and {ratio(fsdp2, none)} over `hf_fsdp2`"
    yield f"({' and '.join(map(ms, theirs))} ms), which recomputed whole layers"
    yield f"with attention kept it leads by {ratio(deepspeed, kept)} and {ratio(fsdp2, kept)}"
    gib_without = [memory.peak(not_recomputed(each)).bytes / GIB for each in theirs]
    assert gib_without[0] < 139 < gib_without[1]  # GiB of an H200
    yield f"`hf_deepspeed` should fit without recomputation ({gib_without[0]:.0f} GiB by the memory model, which"
    yield f"`hf_fsdp2` should not ({gib_without[1]:.0f} GiB)"
    assert not any(each.flags for each in (none, kept, megatron_none, megatron_kept, *theirs))
    yield f"ours {len(none.step_ms)} replicates"
    assert {len(each.step_ms) for each in (megatron_none, *theirs)} == {3}
    assert (len(kept.step_ms), len(megatron_kept.step_ms)) == (4, 1)


def not_recomputed(measured: Cell) -> TrialConfig:
    config = parse(TrialConfig, json.loads(measured.rows[0]["config"]))
    return replace(config, workload=replace(config.workload, activation_checkpointing="none"))


@line("The same at 65,536 tokens, 2 H200s")
def stacks_at_65536() -> Iterator[str]:
    best, alike, theirs = stacks_with_room()
    megatron, *others = theirs
    full = cell("h200x2_engines", "transformer_engine", activation_checkpointing="full")
    yield f"On cuDNN, which theirs ran on, Megatron with TransformerEngine's all-to-all ties with ours: {ms(megatron)}"
    yield f"against {ms(alike)} ms. It holds {gib(megatron)} GiB a GPU, ours {gib(alike)}"
    *both, last = (ratio(each, alike) for each in others)
    took = ", ".join(map(ms, others))
    theirs_behind = f"{shared(both)} over `trl_sft` and `hf_deepspeed`, and by {last} over `hf_fsdp2` ({took} ms)"
    yield f"On that kernel ours leads by {theirs_behind}"
    first, *both, last = (ratio(each, best) for each in theirs)
    yield f"On FlashAttention-4 ours takes {ms(best)} ms and leads by {first}, {both[0]}, {both[1]} and {last}"
    yield f"With whole layers recomputed Megatron takes {ms(full)} ms and {gib(full)} GiB"
    yield replicates(best, alike, full, *theirs)
    ring, beside = (cell("h200x2_engines_2", method) for method in ("transformer_engine", "ulysses"))
    assert Difference(ring, beside).outcome in NEAR
    took = f"{ms(ring)} ms and {gib(ring)} GiB, and ours {ms(beside)} ms and {gib(beside)}"
    yield f"On another machine Megatron with TransformerEngine's ring takes {took}"


NET_STACKS: list[tuple[str, str, dict[str, str]]] = [
    ("fsdp2", "ulysses", {}),
    ("megatron", "transformer_engine", {"variant": "p2p"}),
    ("megatron", "transformer_engine", {"variant": "a2a"}),
    ("hf_fsdp2", "torch_context_parallel", {"variant": "allgather"}),
    ("hf_fsdp2", "torch_context_parallel", {"variant": "alltoall"}),
    ("hf_deepspeed", THEIRS, {}),
]


@cache
def net_of_baselines() -> list[list[Scaling]]:
    """Of each of NET_STACKS a shared sequence beside its baseline, in each campaign where both ran."""
    names = ("h200x2_engines_net", "h200x2_engines_net_2")
    found = [each for name in names for place in scalings(settings(campaign(name))) for each in place.lines]
    return [
        [each for each in found if is_asked(each.cell, {"engine": engine, "method": method, **asked})]
        for engine, method, asked in NET_STACKS
    ]


@line("Stacks net of their baseline, 2 H200s, 32,768 tokens")
def stacks_net_of_their_baseline() -> Iterator[str]:
    ours, *others = net_of_baselines()
    ring, exchange, gathers, turns, deepspeed = others
    kept = [each.efficiency for found in others for each in found]
    of_ours = shared(f"{each.efficiency:.2f}" for each in ours)
    yield f"keep {of_ours} of the speed of two that have one each with ours"
    yield f"and {min(kept):.2f} to {max(kept):.2f} with other stacks"
    shared_ms, alone_ms = " and ".join(ms(e.cell) for e in ours), " and ".join(ms(e.alone) for e in ours)
    yield f"takes {shared_ms} ms for one sequence, and {alone_ms} ms where each GPU has one"
    of_ring, of_exchange = (f"{found[0].efficiency:.2f}" for found in (ring, exchange))
    yield f"Megatron keeps {of_ring} with TransformerEngine's ring and {of_exchange} with its all-to-all"
    yield f"`hf_fsdp2` {shared(f'{each.efficiency:.2f}' for each in (*gathers, *turns))} with either variant"
    yield f"`hf_deepspeed` {deepspeed[0].efficiency:.2f} and {deepspeed[1].efficiency:.2f}"
    theirs, torchs = [e.cell for e in deepspeed], [e.cell for e in (*gathers, *turns)]
    yield f"they take {from_to(theirs)} ms and {from_to(torchs)}"
    alone = [[e.alone for e in found] for found in (deepspeed, gathers)]
    yield f"with a sequence a GPU {from_to(alone[0])} and {from_to(alone[1])}"
    yield f"context parallelism keeps {net_ratios(gathers, deepspeed)} times as much"
    assert ["transient" in each.flags for each in theirs] == [True, False]
    assert {replicates(each.cell, each.alone) for found in (ours, *others) for each in found} == {"one replicate"}
    assert [len(found) for found in (ours, *others)] == [2, 1, 1, 2, 2, 2]  # machines


def from_to(cells: Iterable[Cell]) -> str:
    found = [each.median_step_ms or 0 for each in cells]
    return f"{whole(min(found))} to {whole(max(found))}"


def net_ratios(first: list[Scaling], other: list[Scaling]) -> str:
    """Of two stacks on each machine."""
    found = [one.efficiency / two.efficiency for one, two in zip(first, other, strict=True)]
    return f"{min(found):.2f} and {max(found):.2f}"


def lines_of_net() -> Iterator[str]:
    for (engine, *_), found in zip(NET_STACKS, net_of_baselines(), strict=True):
        alone, together = (" and ".join(map(ms, each)) for each in ([e.alone for e in found], [e.cell for e in found]))
        kept = " and ".join(f"{each.efficiency:.3f}" for each in found)
        yield f"| `{engine}` | {words.method(found[0].cell)} | {alone} | {together} | {kept} |"


def test_engines_says_what_stacks_keep_of_their_speed():
    page = (ROOT / "docs/ENGINES.md").read_text("utf-8")
    said = page.split("\n## Stacks net of their baseline\n")[1].split("\n#")[0]
    assert [each for each in said.splitlines() if each.startswith("| `")] == list(lines_of_net())
    *_, gathers, _, deepspeed = net_of_baselines()
    said = " ".join(said.split())
    assert f"`hf_fsdp2` with the all-gather keeps {net_ratios(gathers, deepspeed)} times as much" in said
    updates: dict[bool, list[float]] = {False: [], True: []}  # of hf_deepspeed: True
    for each in chain(*((e.alone, e.cell) for found in net_of_baselines() for e in found)):
        of_ranks = [part["optimizer"] for row in each.rows for part in row["part_ms"]]
        updates[each.asked["engine"] == "hf_deepspeed"] += of_ranks
    others, slow = (f"{min(found):.0f} to {max(found):.0f} ms" for found in updates.values())
    assert f"the update of `hf_deepspeed` takes {slow}, that of the others {others}" in said
    between_hosts = [100 * max(pair) / min(pair) - 100 for pair in (
        [e.alone.median_step_ms or 0 for e in deepspeed], [e.cell.median_step_ms or 0 for e in deepspeed])]  # fmt: skip
    assert "here those of `hf_deepspeed` differ by {:.1f} and {:.1f}%".format(*between_hosts) in said
    first, second = ([step for row in each.cell.measured for step in row["step_ms"]] for each in deepspeed)
    took = [f"{whole(min(each))} to {whole(max(each))}" for each in (first, second)]
    assert f"they took {took[0]} ms on the first host (flagged `transient`) and {took[1]} on the second" in said


NOT_SOCKETS = ("channels_1", "channels_2", "shm")


def rings_over_chunks() -> tuple[str, str]:
    """How many times as fast as Ulysses in 4 chunks the ring is on 2 GPUs, at 131,072 and at 32,768 tokens."""
    found: dict[int, list[float]] = {131072: [], 32768: []}
    for place in (each for fabric in NOT_SOCKETS for each in places("h200x2_fabrics", fabric=fabric)):
        ring, ulysses = (place.of_kind(method) or place.leader for method in ("ring", "ulysses"))
        seq_len = ring.asked["seq_len"]
        found[seq_len].append(time_over(ulysses, ring))
        assert {"short_window" in each.flags for each in (ring, ulysses)} == {seq_len == 32768}
    return span(found[131072]), span(found[32768])


def rates_of_slower_fabrics() -> str:
    known = bandwidths(campaign("h200x2_fabrics")).items()
    rates = [found.bytes_per_s / GIB for key, found in known if {*key} & {*NOT_SOCKETS} and "send_recv" in key]
    return f"{min(rates):.0f} to {max(rates):.0f} GiB/s"


def over_sockets(length: dict[str, int], num_kv_heads: int, rival: str = "ring") -> float:
    """How many times as fast as a rival the fastest method over TCP sockets is on 2 GPUs."""
    (place,) = places("h200x2_fabrics", fabric="socket", num_kv_heads=num_kv_heads, **length)
    assert (place.leader.asked["method"], place.leader.asked["head_stride"]) == ("all_gather", num_kv_heads // 4)
    return time_over(place.of_kind(rival) or place.leader, place.leader)


@line("A slower fabric, 2 GPUs")
def slower_fabrics() -> Iterator[str]:
    name = "h200x2_fabrics"
    slow = [place for fabric in NOT_SOCKETS for place in places(name, fabric=fabric)]
    rings, ulysses = ([p.of_kind(method) or p.leader for p in slow] for method in ("ring", "ulysses"))
    first = [ring for ring, place in zip(rings, slow, strict=True) if time_over(ring, place.leader) < 1.01]
    cells = f"{len(first)} of {len(slow)} cells with {rates_of_slower_fabrics()} from point to point"
    yield f"It is the fastest, or within 1% of it, in {cells}"
    assert {each.asked["head_chunks"] for each in ulysses} == {4}
    over_chunks, over_short_chunks = rings_over_chunks()
    of_short = f"and {over_short_chunks} at 32,768"
    yield f"{over_chunks} as fast as Ulysses in 4 chunks of heads at 131,072 tokens, {of_short}"
    both = [(each.of_kind("ulysses"), each.of_kind("ring"), each.first.asked) for each in places(name)]
    slower = [(asked["fabric"], asked["num_kv_heads"]) for ulysses, ring, asked in both
              if ulysses and ring and asked["fabric"] != "nvlink" and time_over(ulysses, ring) < 1]  # fmt: skip
    assert slower == [("socket", 32)]
    yield "it is faster than Ulysses, except with 32/32 heads over TCP sockets"
    long, short = (over_sockets(length, 8) for length in (LONG, SHORT))
    yield "Over TCP sockets the all-gather in groups of heads leads or ties"
    yield f"it is {long:.2f}x as fast as the ring at 131,072 tokens and {short:.2f}x at 32,768"
    assert over_sockets(LONG, 32, "ulysses") < 1.02
    yield "With 32/32 heads it ties with Ulysses in 4 chunks"
    yield replicates(*rings, *ulysses)


@line("A slower fabric, 4 GPUs")
def slower_fabrics_on_4() -> Iterator[str]:
    channels, of_host = ("channels_1", "channels_2"), ("shm",)
    yield f"the ring is {span(1 / each for each in slower_on_four(8, channels))} as fast as Ulysses on 1 or 2 NCCL"

    def over(slow: str, fast: str, found: list[Place]) -> list[float]:
        cells = [(each.of_kind(slow), each.of_kind(fast)) for each in found]
        return [time_over(one, two) for one, two in cells if one and two]

    for place in (each for fabric in channels for each in on_four(fabric, 8)):
        assert time_over(place.of_kind("ring") or place.leader, place.leader) < 1.01
    yield "and the fastest, or within 1% of it"
    assert max(max(each, 1 / each) for each in slower_on_four(8, of_host)) < 1.06
    assert min(slower_on_four(8, of_host, **SHORT)) > 1 > max(slower_on_four(8, of_host, **LONG))
    yield "Through host memory the two are within 6%: Ulysses leads at 32,768 tokens, the ring at 131,072"
    short, long = (on_four("socket", 8, **length) for length in (SHORT, LONG))
    assert {each.leader.asked["method"] for each in short + long} == {"all_gather"}
    assert {each.leader.asked["head_stride"] for each in short + long} == {None}
    first, then = (span(over("ulysses", "all_gather", found)) for found in (short, long))
    yield f"the all-gather is the fastest: {first} as fast as Ulysses at 32,768 tokens and {then} at 131,072"
    tie, most = over("ring", "all_gather", long)
    assert tie < 1.02
    yield f"There it is {most:.2f}x as fast as the ring in one campaign, and ties with it in the other"
    yield f"At 32,768 tokens Ulysses is {span(over('ring', 'ulysses', short))} as fast as the ring"
    yield "at 131,072 it is {:.2f}x and {:.2f}x as fast".format(*over("ring", "ulysses", long))
    many = slower_on_four(32, (*channels, *of_host))
    yield f"it is {span(many)} as fast as the ring on channels and through host memory"
    exchanged = on_four("socket", 32)
    assert [[each.asked["method"] for each in place.own[:2]] for place in exchanged] == [["ulysses", "usp"]] * 2
    yield f"over TCP sockets {span(over('usp', 'ulysses', exchanged))} as fast as USP, the next"
    everywhere = [each for fabric in (*channels, *of_host, "socket") for n in (8, 32) for each in on_four(fabric, n)]
    cells = [each for place in everywhere for each in place.own]
    assert {each.asked["head_chunks"] for each in cells if each.asked["method"] == "ulysses"} == {1}
    yield replicates(*cells)
    for each in (each for each in cells if each.asked["seq_len"] == 32768 and each.asked["fabric"] != "socket"):
        assert "short_window" in each.flags


@line("NVLink, 4 GPUs, 131,072 tokens")
def four_gpus() -> Iterator[str]:
    fastest, cudnn = (ring_over_ulysses(sp_size=4, **LONG, **kernel) for kernel in (FA4, CUDNN))
    yield f"Ulysses, by {lead(fastest)} over the ring"
    campaigns, numbers = fastest.tally.rsplit(", ", 1)
    yield f"in {campaigns} ({numbers}), on FlashAttention-4"
    yield f"On cuDNN the ring takes {span(cudnn.ratios.values(), 3)} as long, in {len(cudnn.ratios)} campaigns"


def short_shards_on_4() -> tuple[dict[str, Any], list[tuple[str, Place]], list[Difference]]:
    """What was asked, the places by campaign, and the others of our methods beside the fastest."""
    asked = {"workload": "attention", "pass_kind": "forward_backward", "fabric": "nvlink", "sp_size": 4, **SHORT}
    names = [folder.name for folder in (ROOT / "results").glob("h200x4_*")]
    found = [(name, place) for name in names for place in places(name, **asked)]
    others = [Difference(place.leader, other) for _, place in found for other in place.own[1:]]
    assert {each.fast.asked["method"] for each in others} == {"ulysses"}
    return asked, found, others


def over_short_shards() -> tuple[str, str, str]:
    """How many times as fast as the others Ulysses is: on FlashAttention-4, on FlashAttention-2, and where a row has a
    short window, as all on cuDNN have."""
    *_, others = short_shards_on_4()
    doubtful = [each for each in others if "short_window" in {*each.fast.flags, *each.slow.flags}]
    kernels = [(each.fast.asked["kernel"], each.ratio) for each in others if each not in doubtful]
    assert {kernel for kernel, _ in kernels} == {"flash_attn_4", "flash_attn"}
    on_fa4, on_fa2 = (span(each for name, each in kernels if name == kernel["kernel"]) for kernel in (FA4, FA2))
    return on_fa4, on_fa2, span(each.ratio for each in doubtful)


@line("NVLink, 4 GPUs, 8,192 tokens a GPU")
def short_shards() -> Iterator[str]:
    asked, found, others = short_shards_on_4()
    on_fa4, on_fa2, doubtful = over_short_shards()
    yield f"it is {on_fa4} as fast as the others in the zigzag layout on FlashAttention-4, and {on_fa2} on"
    yield f"among them all on cuDNN, it is {doubtful} as fast"
    (place,) = places("h200x4_rivals", **asked, **FA4)
    yield f"over the ring {ratio(place.own[1], place.leader)} on FlashAttention-4"
    yield f"{len({name for name, _ in found})} campaigns of {replicates(*cells_of(others))}"


@line("Two rings in one, 4 GPUs on NVLink, cuDNN")
def two_rings() -> Iterator[str]:
    name = "h200x4_two_rings_2"
    short, long = ({each.name.series: each for each in campaign(name) if is_asked(each, n)} for n in (SHORT, LONG))

    def of(method: str, **asked: Any) -> list[Cell]:
        return [cell(name, method, **asked, **n) for n in (SHORT, LONG)]

    double, ring, usp = of("double_ring"), of("ring"), of("usp")
    over = [ratio(*pair) for each in (double, usp) for pair in zip(each, ring, strict=True)]
    yield f"Double ring takes {over[0]} as long as our ring at 32,768 tokens and {over[1]} at 131,072"
    yield f"USP {over[2]} and {over[3]}"
    assert len(short) == len(long) == 7
    yield f"are {within(*long.values())}. At 32,768 Ulysses leads"
    (ulysses, _) = of("ulysses")
    assert ranked(list(short.values()))[0] == ulysses
    theirs = [each for each in short.values() if each.asked["method"] == "transformer_engine"]
    yield f"TransformerEngine's three take {span([time_over(each, ulysses) for each in theirs], 3)} as long"
    assert not any({"short_window", "thermal_slowdown"} & {*each.flags} for each in long.values())
    assert all("short_window" in each.flags for each in short.values())
    yield replicates(*short.values(), *long.values())


@line("Contiguous or zigzag shards")
def layouts() -> Iterator[str]:
    def longer(sp_size: int) -> str:
        asked = {"sp_size": sp_size, "pass_kind": "forward_backward", "num_kv_heads": 8, **LONG, **FA4}
        cells = [
            [cell("h200x4_attention", method, layout=layout, **asked) for layout in ("contiguous", "zigzag")]
            for method in ("ring", "all_gather")
        ]
        return span((time_over(*each) for each in cells), 1)

    yield f"With contiguous shards the ring and the all-gather take {longer(2)} as long on 2 GPUs and {longer(4)} on 4"


@line("DeepSpeed's Ulysses, ring-flash-attn")
def libraries() -> Iterator[str]:
    def over(campaign_name: str, ours: str, theirs: str, kernel: dict[str, str], **asked: Any) -> Difference:
        asked |= kernel
        fast = cell(campaign_name, ours, **asked, **({"head_chunks": 1} if ours == "ulysses" else {}))
        return Difference(fast, cell(campaign_name, theirs, **asked))

    on_fa4, on_cudnn, on_fa2 = long = [
        over("h200x2_libraries_2", "ulysses", "deepspeed_ulysses", kernel) for kernel in (FA4, CUDNN, FA2)
    ]
    yield f"takes {on_cudnn.words} as long as ours on cuDNN and {on_fa2.words} on FlashAttention-2"
    yield f"on FlashAttention-4 it is {within(on_fa4.fast, on_fa4.slow)} by medians"
    long_ring = over("h200x2_libraries_2", "ring", "ring_flash_attn", FA2)
    yield f"ring-flash-attn takes {long_ring.words} as long as our ring. With"
    full_fa4, full_cudnn, full_fa2 = full = [
        over("h200x2_libraries_4", "ulysses", "deepspeed_ulysses", kernel) for kernel in KERNELS
    ]
    ring = over("h200x2_libraries_4", "ring", "ring_flash_attn", FA2)
    yield f"32/32 heads DeepSpeed's Ulysses takes {full_fa4.words} as long as ours on FlashAttention-4"
    yield f"{full_cudnn.words} on cuDNN and {full_fa2.words} on FlashAttention-2. Ours leads on each"
    assert all(map(leads_within_a_tie, full))
    yield "by less than the 2% that we call a difference"
    yield f"ring-flash-attn takes {ring.words} as long as our ring. At"
    of_ulysses = of_rows("transient", full_fa4.fast)
    yield f"with 32/32 heads at 131,072 tokens {code_of_last()} on another machine"
    yield f"{of_ulysses} rows of our Ulysses on FlashAttention-4 are flagged `transient`"
    short = [
        over("h200x2_libraries_3", "ulysses", "deepspeed_ulysses", kernel, num_kv_heads=heads)
        for kernel in (FA4, CUDNN, FA2)
        for heads in (8, 32)
    ]
    short_rings = [over("h200x2_libraries_3", "ring", "ring_flash_attn", FA2, num_kv_heads=heads) for heads in (8, 32)]
    yield f"DeepSpeed's Ulysses takes {span((each.ratio for each in short), 3)} as long as ours, and"
    yield f"ring-flash-attn {span((each.ratio for each in short_rings), 3)} as long as our ring. On 4 GPUs"
    pairs = [*long, long_ring, *full, ring, *short, *short_rings]
    yield f"2 H200s, {replicates(*cells_of(pairs))}"
    assert sum("transient" in each.slow.flags for each in short + short_rings) > len(short + short_rings) / 2
    with_fa2 = Difference(on_fa4.fast, on_fa2.fast)
    yield f"With our Ulysses FlashAttention-2 takes {with_fa2.words} as long as FlashAttention-4"
    rings = {
        name: [pair(name, "ring_flash_attn", "ring", **FA2, **length) for length in (LONG, SHORT)]
        for name in ("h200x4_rivals", "h200x4_rivals_2", "h200x4_libraries")
    }
    third = rings.pop("h200x4_libraries")
    settled = [each for of_campaign in rings.values() for each in of_campaign]
    yield f"takes {span((each.ratio for each in settled), 3)} as long as our ring in two campaigns of"
    yield f"campaigns of {replicates(*cells_of(settled))}"
    yield f"a third, of {replicates(*cells_of(third))} with doubtful times, has {third[1].words} once"
    assert "window_disagrees" in third[1].slow.flags


@line("TransformerEngine's context parallelism, 2 H200s")
def transformer_engine() -> Iterator[str]:
    pairs = [("p2p", "ring", FA4), ("p2p", "ring", CUDNN), ("a2a", "ulysses", CUDNN)]
    pairs += [("all_gather", "all_gather", kernel) for kernel in KERNELS]
    grouped, full = (
        [
            Difference(cell(name, ours, **kernel), cell(name, "transformer_engine", variant=theirs, **kernel))
            for theirs, ours, kernel in pairs
        ]
        for name in ("h200x2_libraries_2", "h200x2_libraries_4")
    )
    for heads, found in (("32/8", grouped), ("32/32", full)):
        on_fa4, on_cudnn, exchanged, *gathers = (each.words for each in found)
        yield f"With {heads} heads `p2p` takes {on_fa4} as long as our ring on FlashAttention-4 and {on_cudnn} on cuDNN"
        yield f"`a2a` takes {exchanged} as long as our Ulysses there"
        yield "Its all-gather takes {} as long as ours on FlashAttention-4, {} on cuDNN and {} on".format(*gathers)
        assert of_rows("transient", found[3].slow) == "1 of 6"
    yield "With either head shape one row of its all-gather on FlashAttention-4 is flagged `transient`"
    yield f"32/32 heads {code_of_last()} on another machine"
    libraries = [dict(each.slow.asked["environment"]["packages"]) for each in grouped + full]
    versions = (shared(each[name] for each in libraries) for name in ("transformer-engine", "flash-attn-4"))
    yield "{}, FlashAttention-4 {}, {}".format(*versions, replicates(*cells_of(grouped + full)))


@line("Every library on one kernel, 2 H200s")
def every_library() -> Iterator[str]:
    num_columns = len([*of_each_column()])
    yield f"{within_fastest()}, in {num_columns} of {num_columns} columns"
    yield f"TransformerEngine's ring is {ring_behind()}. These are {tie_of_rings()}"
    found = [each for each in campaign("h200x2_libraries_2") if each.ok]
    (gather,) = (each for each in found if is_asked(each, {"variant": "all_gather", **CUDNN}))
    (llama,) = (each for each in found if each.asked["method"] == "ring_flash_attn_llama3")
    first = {kernel["kernel"]: ranked([c for c in found if is_asked(c, kernel)])[0] for kernel in KERNELS}
    others = [each for each in found if each not in (gather, llama)]
    most = max(time_over(each, first[each.asked["kernel"]]) for each in others)
    yield f"all but two are within {math.ceil(100 * (most - 1))}% of the fastest on their kernel"
    yield f"TransformerEngine's all-gather on its own cuDNN attention takes {ratio(gather, first['cudnn'])} as long"
    yield f"ring-flash-attn's `llama3`, whose shards are contiguous, {ratio(llama, first['flash_attn'])}"
    on_fa4, on_cudnn, on_fa2 = (first[kernel["kernel"]] for kernel in KERNELS)
    beside = " and ".join(f"{time_over(each, on_fa4):.2f}x" for each in (on_cudnn, on_fa2))
    yield f"The fastest on cuDNN and on FlashAttention-2 take {beside} as long as that on FlashAttention-4"
    packages = (dict(each.asked["environment"]["packages"]) for *_, cells, _ in of_each_column() for each in cells)
    version = shared(each["flash-attn-4"] for each in packages)
    yield "FlashAttention-4 {}, {}, but `llama3` has {} in one table".format(version, *replicates_of_libraries())
    full = [each for each in campaign("h200x2_libraries_4") if is_asked(each, FA4)]
    yield f"6b63d51, with 32/32 heads at 131,072 tokens {code_of_last()} on another machine, where"
    yield f"{of_rows('transient', *full)} rows on FlashAttention-4 are flagged `transient`"


def code_of_last() -> str:
    """The commit of the table of 131,072 tokens with 32/32 heads, which the rows have."""
    return shared(row["git_sha"][:7] for each in campaign("h200x2_libraries_4") for row in each.rows)


def replicates_of_libraries() -> tuple[str, int]:
    """Of all cells but one, and of that one."""
    cells = [each for *_, of_column, _ in of_each_column() for each in of_column]
    few = [each for each in cells if len(each.step_ms) < 5]
    assert [each.asked["method"] for each in few] == ["ring_flash_attn_llama3"]
    return replicates(*(each for each in cells if each not in few)), len(few[0].step_ms)


def steps_of_upipe() -> tuple[Cell, Cell]:
    of_step = {"seq_len": 65536, "activation_checkpointing": "selective", **FA4}
    return cell("h200x2_step_upipe", "ulysses", **of_step), cell("h200x2_step_upipe", "upipe", **of_step)


def test_the_methods_page_has_the_whole_step_of_upipe() -> None:
    ulysses, upipe = steps_of_upipe()
    sent = [f"{(each.communication.counted_bytes or 0) / GIB:.1f}" for each in (upipe, ulysses)]
    text = " ".join((ROOT / "docs" / "METHODS.md").read_text().split())
    assert f"{ratio(upipe, ulysses)} as long with UPipe as with Ulysses: {ms(upipe)} against {ms(ulysses)} ms" in text
    assert f"holds {gib(upipe)} against {gib(ulysses)} GiB a GPU" in text
    assert f"sends {sent[0]} against {sent[1]} GiB" in text
    assert (replicates(ulysses, upipe), upipe.flags, ulysses.flags) == ("6 replicates", [], [])


@line("Stages of heads (UPipe), 2 H200s")
def stages_of_heads() -> Iterator[str]:
    more = []
    for heads in (8, 32):
        ulysses, chunks, four, one = upipe_beside_ulysses(num_kv_heads=heads, **LONG)
        more.append(100 * Difference(ulysses, one).ratio - 100)
        yield f"takes {ratio(one, ulysses)} as long as Ulysses and holds {gib(one)} against {gib(ulysses)} GiB"
        if heads == 8:
            yield f"in 4 stages {ratio(four, ulysses)} and {gib(four)} GiB"
            yield f"in 4 chunks takes {ratio(chunks, ulysses)} as long and holds {gib(chunks)} GiB"
    yield f"for {more[0]:.1f} to {more[1]:.1f}% more time"
    ulysses, _, four, _ = upipe_beside_ulysses(num_kv_heads=8, **SHORT)
    yield f"with 32/8 heads 4 stages take {ratio(four, ulysses)} as long"
    bound = [of_rows("host_bound", upipe_beside_ulysses(num_kv_heads=heads, **SHORT)[-1]) for heads in (8, 32)]
    yield f"waits for the host in {bound[0]} rows, and in {bound[1]} with 32/32 heads"
    ulysses, upipe = steps_of_upipe()
    yield f"takes {ratio(upipe, ulysses)} as long as with Ulysses, {ms(upipe)} against {ms(ulysses)} ms"
    yield f"and holds {gib(upipe)} against {gib(ulysses)} GiB. [The table]"
    yield f"FlashAttention-4, {replicates(*campaign('h200x2_upipe'))}"
    yield f"the step {replicates(ulysses, upipe)} on another machine"
    long, short = ([each for each in campaign("h200x2_upipe") if is_asked(each, n)] for n in (LONG, SHORT))
    stages = [each for each in long if each.asked["method"] == "upipe"]
    yield f"{of_rows('transient', *stages)} rows of UPipe at 131,072 tokens and all at 32,768 are flagged"
    assert of_rows("transient", *short) == "48 of 48"


@line("What torch reserves for a ring")
def reserved_for_a_ring() -> Iterator[str]:
    *attention, (_, *step) = shifts()
    few, many, long = (both for _, *both in attention)  # 32/8 heads, 32/32 heads, and the longer sequence
    kept, now = ([f"{reserved_gib(each):.1f}" for each in both] for both in zip(few, many, long, strict=True))
    yield f"with 32/32 heads allocates {gib(many[0])} GiB a GPU and reserves {now[1]}"
    yield f"when our ring used torch's send and receive it reserved {kept[1]} after 70 steps"
    yield f"With 32/8 heads it reserved {kept[0]} GiB and reserves {now[0]}"
    yield f"at 131,072 tokens, after 6 steps, {kept[2]} and {now[2]}"
    yield f"at 65,536 tokens, which allocates {gib(step[0])} GiB"
    yield f"it reserved {reserved_gib(step[0]):.1f} and reserves {reserved_gib(step[1]):.1f}"
    yield f"FlashAttention-4, {replicates(*few, *many, *long)}"
    yield f"the whole step on cuDNN, {replicates(*step)} each"
    _, name, asked = RESERVED[1]
    theirs = cell(name, **asked[-1])
    yield f"with 32/32 heads, allocates {gib(theirs)} GiB and reserves {reserved_gib(theirs):.1f} after 40 steps"
    yield f"TransformerEngine's {replicates(theirs)}"


@line("Longer sequences in less memory, 2 GPUs, 65,536 tokens")
def offloaded_checkpoints() -> Iterator[str]:
    kept = {"activation_checkpointing": "selective", "seq_len": 65536}
    here, on_host = (cell(name, "ulysses", **kept) for name in ("h200x2_step_methods", "h200x2_step_memory"))
    assert here.options["workload.checkpoint_offload"] < on_host.options["workload.checkpoint_offload"]
    yield f"Offload checkpoints for {ratio(on_host, here)} the time"
    yield f"the peak falls from {gib(here)} to {gib(on_host)} GiB a GPU"
    yield replicates(here, on_host)


@line("What that costs with whole layers recomputed, 2 GPUs, 65,536 tokens")
def tiles_and_offload() -> Iterator[str]:
    def step(method: str, tile: int | None, **asked: Any) -> Cell:
        return cell("h200x2_step_tiles", method, mlp_tile_tokens=tile, **asked)

    plain, on_host, tiles, both = (
        step("ulysses", tile, checkpoint_offload=offload) for tile in (None, 4096) for offload in (False, True)
    )
    yield f"A step takes {ms(plain)} ms. With checkpoints in host memory it takes {ratio(on_host, plain)} as long"
    yield f"in tiles of {whole(4096)} tokens {ratio(tiles, plain)}, and with both {ratio(both, plain)}"
    yield f"Less than {100 * max(time_over(each, plain) - 1 for each in (on_host, tiles, both)):.0f}% of the time"
    assert max(time_over(each, plain) for each in (on_host, tiles, both)) < 1.02
    assert gib(plain) == gib(on_host)
    yield f"Its peak is {gib(plain)} GiB a GPU, and {gib(tiles)} GiB in tiles"
    theirs, in_tiles = (step(THEIRS, tile) for tile in (None, 4096))
    yield f"takes {ratio(in_tiles, theirs)} as long with such tiles ({ms(in_tiles)} against {ms(theirs)} ms)"
    yield f"and holds {gib(in_tiles)} against {gib(theirs)} GiB"
    yield f"loss in tiles, {replicates(plain, on_host, tiles, both)}, no intervals"
    yield f"Liger's kernels, {replicates(theirs, in_tiles)}"


@line("Where memory runs out, 2 H100s of 80 GB")
def longest_on_h100s() -> Iterator[str]:
    def ours(method: str, recomputed: str) -> tuple[int, int]:
        return ends("h100x2_longest", method, SEGMENTS, activation_checkpointing=recomputed)

    ulysses, ring, upipe = (ours(method, "full") for method in ("ulysses", "ring", "upipe"))
    trl, deepspeed = (ends("h100x2_theirs", THEIRS, SEGMENTS, engine=engine) for engine in ("trl_sft", "hf_deepspeed"))
    assert ulysses == ring
    yield f"Ulysses and the zigzag ring fit {whole(ulysses[0])} tokens of Qwen3-4B, not {whole(ulysses[1])}"
    yield f"UPipe fits {written(upipe)}."
    yield f"`trl_sft` fits {written(trl)}; `hf_deepspeed` {written(deepspeed)}"
    over = [times_as_many(ulysses, each) for each in (trl, deepspeed)]
    yield f"Ulysses fits {over[0]} as many tokens as `trl_sft` and {over[1]} as many as `hf_deepspeed`"
    less = [f"{written(ours('ulysses', kept))} (`{kept}`)" for kept in ("selective_output", "selective")]
    yield f"Ulysses fits {', '.join(less)}, or {written(ours('ulysses', 'none'))} (nothing recomputed)"


@line("The same with other settings, 2 H200s capped at 79.6 GiB")
def longest_elsewhere() -> Iterator[str]:
    trl, deepspeed = (written(ends("h200x2_theirs", THEIRS, engine=each)) for each in ("trl_sft", "hf_deepspeed"))
    yield f"`trl_sft` fits {trl}, and `hf_deepspeed`, whose logits are whole, {deepspeed}"
    plain, segments = (written(ends("h200x2_longest", "ulysses", each)) for each in (None, SEGMENTS))
    yield f"Ulysses fits {plain}, on torch's allocator, and {segments}, on `expandable_segments`"
    assert ends("h200x2_longest", "ring", SEGMENTS) == ends("h200x2_longest", "ulysses", SEGMENTS)
    yield f"the ring fits as many, and the all-gather {written(ends('h200x2_longest', 'all_gather', SEGMENTS))}"
    kept, none, full, output = (
        [written(whole_mlp(method, recomputed)) for method in ("ulysses", "ring", "all_gather")]
        for recomputed in ("selective", "none", "full", "selective_output")
    )
    assert (kept[1], none[1], full[0]) == (kept[2], none[2], full[1])
    more = times_as_many(*(whole_mlp(method, "selective") for method in ("ring", "ulysses")))
    yield f"with `selective` and the MLP whole both fit {kept[1]}, and Ulysses {kept[0]}, so they fit {more} as many"
    yield f"with nothing recomputed both fit {none[1]}, and Ulysses {none[0]}"
    yield f"Ulysses fits {output[0]}, the ring {output[1]}, and the all-gather {output[2]}. "
    yield f"Ulysses and the ring fit {full[0]}, and the all-gather {full[2]}"
    yield f"UPipe fits most: {written(ends('h200x2_longest', 'upipe', SEGMENTS))}"
    host = partial(ends, "h200x2_longest_4", allocator=SEGMENTS)
    updated = [written(host(method=method, optimizer_offload="torch_adamw")) for method in ("ulysses", "ring")]
    updated.append(written(ends("h200x2_longest_7", "all_gather", SEGMENTS)))
    yield "with the optimizer there Ulysses fits {}, the ring {}, and the all-gather {}".format(*updated)
    kept_there = host(method="ulysses", checkpoint_offload=True)
    theirs = [ends("h200x2_theirs", THEIRS, engine=each) for each in ("trl_sft", "hf_deepspeed")]
    over = [times_as_many(kept_there, each) for each in theirs]
    others = [ends("h200x2_longest_6", each, SEGMENTS, checkpoint_offload=True) for each in ("ring", "all_gather")]
    yield f"with the checkpoints there Ulysses fits {written(kept_there)}"
    yield f"the ring {written(others[0])}, and the all-gather {written(others[1])}. "
    best = written(ends("h200x2_theirs_ends", THEIRS, SEGMENTS))
    yield f"`trl_sft` at its best, without tiles of the MLP, fits {best}. "
    yield f"The {whole(kept_there[0])} are {over[0]} as many as `trl_sft` and {over[1]} as many as `hf_deepspeed`"


def whole_mlp(method: str, recomputed: str) -> tuple[int, int]:
    """The ends on 2 H200s where the MLP has no tiles."""
    name = "h200x2_longest_6" if recomputed == "selective_output" else "h200x2_longest_3"
    return ends(name, method, SEGMENTS, activation_checkpointing=recomputed)


@line("A million tokens of Qwen3-4B, 4 H200s capped at 79.6 GiB")
def million_of_4b() -> Iterator[str]:
    (fits,) = campaign("h200x4_longest")
    (found,) = limits([fits])
    assert (found.largest_ok, found.smallest_oom) == (fits, None)
    yield f"They fit: {whole(fits.asked['seq_len'])} tokens with Ulysses"
    host = max(row["max_peak_host_bytes"] for row in fits.rows) / GIB
    (row,) = fits.rows
    peak = memory.peak(parse(TrialConfig, json.loads(row["config"])))
    yield f"{gib(fits)} GiB are allocated on a GPU, {peak.bytes / GIB:.1f} by the memory model of a real step"
    yield f"({peak.last_layer / GIB:.1f} for what this step computed)"
    yield f"a rank takes {host:.1f} GiB of the host"
    ulysses, best, published = (
        ends("h200x4_longest_2", *asked) for asked in (("ulysses", SEGMENTS), (THEIRS, SEGMENTS), (THEIRS, None))
    )
    yield f"With nothing in host memory Ulysses fits {written(ulysses)}"
    for said, them in (("best", best), ("published settings", published)):
        times = times_as_many(ulysses, them)
        yield f"`hf_deepspeed` at its {said} fits {written(them)}: Ulysses fits {times} as many"
    upipe, ring, gather = (ends("h200x4_longest_2", method, SEGMENTS) for method in ("upipe", "ring", "all_gather"))
    yield f"{written(upipe)}, which is {times_as_many(upipe, ulysses)} as many as Ulysses"
    yield f"The zigzag ring fits {written(ring)}, and the all-gather {written(gather)}"


@line("The published ladder of Arctic Long Sequence Training")
def published_ladder() -> Iterator[str]:
    two = partial(ends, "h200x2_longest_5", "ulysses", SEGMENTS)
    logits, tiles = two(loss_tile_tokens=None), two(loss_tile_tokens=2048, checkpoint_offload=False)
    one = partial(ends, method="single", allocator=SEGMENTS)
    logits_of_one = one("h200x1_longest", loss_tile_tokens=None)
    tiles_of_one = one("h200x1_longest_2", checkpoint_offload=False)
    yield f"Llama-3-8B fits {whole(tiles[0])} tokens on two H200s, not {whole(tiles[1])}"
    yield f"Qwen3-4B {whole(tiles_of_one[0])} on one, not {whole(tiles_of_one[1])}"
    yield f"they fit {written(logits)}, and {written(logits_of_one)}"
    on_host = two(mlp_tile_tokens=4096), one("h200x1_longest_3", mlp_tile_tokens=4096)
    yield f"{whole(on_host[0][0])} fit, not {whole(on_host[0][1])}, and {written(on_host[1])}"
    assert all(there < here for there, here in zip(on_host, (tiles, tiles_of_one), strict=True))
    whole_of_one = one("h200x1_longest_3", mlp_tile_tokens=None)
    (of_two,) = limits([each for each in campaign("h200x2_longest_7") if each.asked["method"] == "ulysses"])
    assert of_two.largest_ok
    assert of_two.smallest_oom
    fits, fails, fits_two, fails_two = map(
        whole, (*whole_of_one, of_two.largest_ok.asked["seq_len"], of_two.smallest_oom.asked["seq_len"])
    )
    yield f"with it whole {fits} fit on one, not {fails}, and {fits_two} on two, not {fails_two}"
    config = parse(TrialConfig, json.loads(of_two.largest_ok.rows[0]["config"]))
    alone = replace(config, sp_size=1, seq_len=256, method=replace(config.method, name="single"))
    yield f"needs {memory.needed_on_host_bytes(alone) / GIB:.1f} GiB of its host"


@line("A million tokens, 2 GPUs")
def million() -> Iterator[str]:
    ulysses, ring = (cell("h200x2_million", method) for method in ("ulysses", "ring"))
    assert Difference(ulysses, ring).outcome in NEAR
    yield f"{whole(ulysses.asked['seq_len'])} tokens of Qwen3-0.6B take {seconds(ulysses)} with Ulysses"
    yield f"and {seconds(ring)} with the zigzag ring"
    yield f"at {ulysses.mfu:.2f} MFU"
    yield f"{gib(ulysses)} and {gib(ring)} GiB"


@line("Long steps of Qwen3-4B, 1 and 2 GPUs")
def long_steps() -> Iterator[str]:
    for step, where in (
        (cell("h200x1_long", "single"), "on one H200,"),
        (cell("h200x2_half_million", "ulysses"), "on two, with Ulysses,"),
    ):
        took = f"in {seconds(step)} at {step.mfu:.2f} MFU, with {gib(step)} GiB"
        yield f"{whole(step.asked['seq_len'])} tokens {where} {took}"


@line("What each option brings, 2 GPUs, 32,768 tokens")
def ladder() -> Iterator[str]:
    def rung(recomputed: str, **options: Any) -> Cell:
        asked = {"loss_tile_tokens": 2048, "model_code": "compiled", "optimizer_offload": None} | options
        return cell("h200x2_step_memory_2", "ulysses", activation_checkpointing=recomputed, **asked)

    def took(step: Cell) -> str:
        return f"{ms(step)} ms and {gib(step)} GiB"

    plain, tiles = rung("none", model_code="eager", loss_tile_tokens=None), rung("none", model_code="eager")
    fastest, selective, full = map(rung, ("none", "selective", "full"))
    optimizer, all_on_host = rung("full", optimizer_offload="torch_adamw"), cell("h200x2_step_memory_3", "ulysses")
    yield f"A plain step takes {took(plain)} a GPU"
    yield f"With the loss in tiles it takes {took(tiles)}, with compiled layers and loss {took(fastest)}"
    yield f"at {fastest.mfu:.2f} MFU"
    yield f"Recomputing all but attention takes {took(selective)}, whole layers {took(full)}"
    on_host = [f"{(each.largest('max_peak_host_bytes') or 0) / GIB:.1f} GiB" for each in (optimizer, all_on_host)]
    yield f"With the optimizer in host memory that becomes {took(optimizer)}, and {on_host[0]} of a rank there"
    yield f"with the checkpoints there, too, {took(all_on_host)}, and {on_host[1]} there"
    assert plain.flags == ["allocator_retried"]
    yield f"two steps of {replicates(plain, tiles, fastest, selective, full, optimizer, all_on_host)}"


@line("Kernels alone, 1 GPU, 32,768 tokens")
def kernels() -> Iterator[str]:
    cells = [
        cell("h200_kernels_2", "single", kernel=kernel, pass_kind="forward_backward")
        for kernel in ("flash_attn_3", "flash_attn_4", "cudnn")
    ]
    third, fourth, cudnn = (whole(attention_tflops(each)) for each in cells)
    assert Difference(cells[1], cells[0]).outcome in NEAR
    yield f"{third} and {fourth} TFLOP/s forward and backward, and cuDNN has {cudnn}"
    yield replicates(*cells)


@line("Packed documents, 2 GPUs, 131,072 tokens")
def packs() -> Iterator[str]:
    ulysses = cell(PACKS, "ulysses", head_chunks=4, **AROUND_4096)
    cut = cell(PACKS, "ring", layout="document_zigzag", **AROUND_4096, **FA4)
    ring, gather = (cell(PACKS, method, layout="zigzag", **AROUND_4096, **FA4) for method in ("ring", "all_gather"))
    drawn = ulysses.asked["num_documents"], whole(ulysses.asked["document_len"])
    yield "a pack of {} documents (lognormal, median {})".format(*drawn)
    assert ranked([each for each in campaign(PACKS) if is_asked(each, AROUND_4096 | FA4)])[0] is ulysses
    yield "Ulysses in 4 chunks is the fastest"
    yield f"zigzag ring takes {ratio(ring, ulysses)} and the zigzag all-gather {ratio(gather, ulysses)} as long"
    yield f"one of their ranks has {ring.asked['flops_imbalance']:.2f} of the mean work"
    yield f"has even work and takes {ratio(cut, ulysses)}"
    few_long = cell(PACKS, "ulysses", **FEW_LONG, **FA4), cell(PACKS, "ring", layout="zigzag", **FEW_LONG, **FA4)
    yield f"zigzag is nearly even ({few_long[1].asked['flops_imbalance']:.2f})"
    yield f"the zigzag ring leads, and Ulysses in one exchange takes {ratio(*few_long)}"
    as_even = share_as_even(2, 1024, 2.0, few_long[1].asked["flops_imbalance"])
    yield f"{as_even:.0%} of packs drawn alike are as even"
    yield f"FlashAttention-4, {replicates(ulysses, cut, ring, gather, *few_long)}"
    drawn_alike = draws(4096) + draws(1024)
    behind = max(behind_fastest(drawn_alike))
    yield f"{len(drawn_alike)} packs of two kinds it is the fastest, or within {behind:.1%} of it"
    rings = zigzag_rings()
    yield f"the zigzag ring takes {times(min(rings))} to {times(max(rings))} as long"
    yield f"the {len(drawn_alike)} packs {replicates(*campaign(DRAWS))}, d03be24"


@line("Libraries on packed documents, 2 GPUs")
def libraries_on_packs() -> Iterator[str]:
    ulysses = cell(PACKS, "ulysses", **AROUND_4096, **FA2)
    methods = ("transformer_engine", "ring_flash_attn", "ring_flash_attn_llama3")
    theirs, *two = (cell(PACKS, method, **AROUND_4096) for method in methods)
    yield f"TransformerEngine's ring takes {ratio(theirs, ulysses)} as long"
    assert Difference(theirs, cell(PACKS, "ring", **AROUND_4096, **FA2)).outcome in NEAR
    yield "ties with our ring that cuts each document"
    assert "host_bound" in theirs.flags
    yield f"ring-flash-attn's ring takes {ratio(two[0], ulysses)}, its `llama3` {ratio(two[1], ulysses)}"
    yield f"FlashAttention-2, 131,072 tokens, {replicates(ulysses, theirs, *two)}"


@line("Training step on packed documents, Qwen3-4B, 2 GPUs, 65,536 tokens")
def packed_step() -> Iterator[str]:
    steps = [cell("h200x2_packed_step", method, layout=layout) for method, layout in STEPS]
    ulysses, *others = steps
    cut, ring, gather = (f"{time_over(each, ulysses):.3f}x" for each in others)
    yield f"Methods lie {within(*steps)}"
    yield f"Ulysses takes {ms(ulysses)} ms and {gib(ulysses)} GiB, the others {shared(map(gib, others))} GiB"
    yield f"The ring that cuts each document takes {cut} as long"
    yield f"the zigzag ring {ring}, the zigzag all-gather {gather}"
    yield f"{ulysses.asked['num_documents']} documents, {replicates(*steps)}"


@line("Packed documents, 1 GPU, 131,072 tokens")
def kernel_on_packs() -> Iterator[str]:
    few_long, around, short, one = cells = packs_of_one_gpu("h200_packed")
    more = [100 * time / work - 100 for work, time in (of_one(pack, one) for pack in (few_long, around, short))]
    yield f"Packs of {around.asked['num_documents']} to {few_long.asked['num_documents']} uneven documents"
    yield f"take {more[0]:.0f} to {more[1]:.0f}% more time than their share of the work"
    yield f"{short.asked['num_documents']} short ones {more[2]:.0f}%"
    yield f"FlashAttention-4 alone, {replicates(*cells)}"


@line("2,048 tokens a GPU")
def replayed() -> Iterator[str]:
    cells = [each for place in places("h200x2_latency", seq_len=4096) for each in place.cells]
    graphs = {(each.series, each.asked["kernel"]): each for each in cells if each.launch_note}
    slower = [Difference(graphs[each.series, each.asked["kernel"]], each) for each in cells if not each.launch_note]
    low, *_, high = sorted(each.ratio for each in slower)
    yield f"A step launched call by call takes {low:.1f} to {high:.1f} times as long"
    ulysses = next(each for each in slower if is_asked(each.fast, {"method": "ulysses", **FA4}))
    yield f"Ulysses on FlashAttention-4 takes {ulysses.words}"
    yield replicates(*cells)


@line("- Checked first.")
def unsampled() -> Iterator[str]:
    yield f"{sum(each.num_unsampled for each in every_cell())} committed rows are older than the check"
    timed = [row for each in every_cell() for row in each.rows if row["median_step_ms"] and row["hardware"] in GPUS]
    in_groups = sum(row["isolation"] == "group" for row in timed) / len(timed)
    yield f"in {in_groups:.0%} of the timed GPU rows here"


@line("Older rows lack newer columns.")
def renamed() -> Iterator[str]:
    rows = sp_bench.load([str(folder) for folder in sorted((ROOT / "results").iterdir())])
    names = zip(rows["campaign"], rows["campaign_as_run"], strict=True)
    renamed = [folder for folder, name in names if name != folder]
    yield f"{len(renamed)} rows in {len(set(renamed))} folders were run under another name"


# What is said, and whether it is what the rows give.


def paragraphs() -> list[str]:
    """Of README.md and docs/ANSWERS.md; no word is bold."""
    pages = (ROOT / name for name in ("README.md", "docs/ANSWERS.md"))
    return [each for page in pages for each in page.read_text("utf-8").replace("**", "").strip().split("\n\n")]


def results() -> dict[str, str]:
    """Where -> its line of the tables of docs/ANSWERS.md."""
    tables = [each for each in paragraphs() if each.startswith("| where | answer | evidence |")]
    return {text.split(" | ")[0].removeprefix("| "): text for table in tables for text in table.splitlines()[2:]}


def passage(start: str) -> str:
    """The line of the results, or the paragraph, that begins so."""
    found = [text for text in [*results().values(), *paragraphs()] if text.removeprefix("| ").startswith(start)]
    assert len(found) == 1, f"{len(found)} passages begin with {start!r}"
    return " ".join(found[0].split())


@pytest.mark.parametrize("start", LINES)
def test_a_line_says_what_the_rows_give(start):
    text, given = passage(start), [*LINES[start]()]
    missing = [said for said in given if said.casefold() not in text.casefold()]
    assert not missing, f"{start!r}: the rows give {missing}, the text says {text!r}"
    if text in results().values() or start in ASKED:
        answer = text if start in ASKED else text.split(" | ")[1]
        for said in (*given, *BY_HAND):
            answer = re.sub(re.escape(said), "", answer, flags=re.IGNORECASE)
        assert not QUANTITY.search(answer), f"{start!r}: no row was asked about the numbers in {answer!r}"


def test_each_line_of_the_results_is_asked_of_the_rows_or_named_with_the_reason():
    named = (*LINES, *NOT_OF_ROWS)
    assert [where for where in results() if not where.startswith(named)] == []
    text = " ".join(paragraphs())
    assert [said for said in (*NOT_OF_ROWS, *BY_HAND) if said not in text] == []


def test_campaigns_says_how_many_machines_the_devices_are_of():
    devices: dict[int, set[str]] = {}
    kinds: dict[int, str] = {}
    for each in every_cell():
        for row in each.rows:
            if (machine := row["device_set"]) is not None:
                uuids = {str(uuid).removeprefix("GPU-") for uuid in row["environment"]["device_uuids"]}
                devices.setdefault(machine, set()).update(uuids)
                kinds[machine] = str(row["hardware"]).upper()
    found = Counter((kinds[machine], len(uuids)) for machine, uuids in devices.items())
    text = " ".join((ROOT / "docs/CAMPAIGNS.md").read_text("utf-8").split())
    names = {"H200": "H200", "H100": "H100 80GB"}
    told = re.search(r"numbered by first use: (.*?)\.", text)
    assert told
    assert set(told[1].split(", ")) == {f"{n} of {size} x {names[kind]}" for (kind, size), n in found.items()}


def devices_of(cell: Cell) -> set[str]:
    return {str(uuid) for row in cell.rows for uuid in row["environment"]["device_uuids"]}


def on_two_machines() -> list[tuple[float, Cell, Cell]]:
    """By how much equal cells differ, where no device is of both."""
    equal: dict[str, list[Cell]] = {}
    for each in every_cell():
        if each.ok and each.asked["hardware"] in GPUS and each.asked["workload"] != "collective":
            equal.setdefault(each.rows[0]["cell_id"], []).append(each)
    pairs = [pair for cells in equal.values() for pair in combinations(cells, 2) if all(c.median_step_ms for c in pair)]
    apart = [ranked(pair) for pair in pairs if not devices_of(pair[0]) & devices_of(pair[1])]
    return [(100 * time_over(slow, fast) - 100, slow, fast) for fast, slow in apart]


def test_campaigns_and_projection_say_by_how_much_equal_cells_on_two_machines_differ():
    pairs = on_two_machines()
    of_sockets, others = ([p for p in pairs if (p[1].asked["fabric"] == "socket") == on] for on in (True, False))
    slow_gpu = {"uneven_devices", "thermal_slowdown"}
    even = [p for p in others if not slow_gpu & {*p[1].flags, *p[2].flags}]
    *_, (most, *cells) = sorted(even, key=lambda pair: pair[0])
    assert all("short_window" in c.flags and c.asked["seq_len"] == 32768 for c in cells)
    long = max(p[0] for p in even if is_asked(p[1], {**LONG, "fabric": "nvlink"}))
    theirs = max(p[0] for p in even if p[1].asked["engine"] == "hf_deepspeed")
    within = sum(p[0] <= 3 for p in even)
    told = " ".join((ROOT / "docs/CAMPAIGNS.md").read_text("utf-8").split())
    first = f"Of {len(even)} pairs of equal cells on two machines {within} differ by at most 3%"
    assert f"{first}, and the others by up to {most:.1f}%" in told
    assert f"The {most:.1f}% are of 32,768 tokens, and flagged" in told
    at_length = f"At 131,072 tokens over NVLink cells differ by up to {long:.1f}%"
    assert f"{at_length}, and steps of `hf_deepspeed` by up to {theirs:.1f}%" in told
    over_sockets = max(p[0] for p in of_sockets)
    assert f"Over TCP sockets two machines differ by up to {over_sockets:.0f}%" in told
    projection = (ROOT / "docs/PROJECTION.md").read_text("utf-8")
    assert f"two machines differ by up to {over_sockets:.0f}% in the same cell there" in projection


def test_projection_has_how_many_times_as_many_tokens_methods_fit_on_2_gpus():
    kept, none, full = (
        [whole_mlp(method, recomputed) for method in ("ulysses", "ring")]
        for recomputed in ("selective", "none", "full")
    )
    of_ring, of_ring_with_all = (times_as_many(ring, ulysses) for ulysses, ring in (kept, none))
    projection = " ".join((ROOT / "docs/PROJECTION.md").read_text().split())
    more = of_ring.replace("x", "")
    assert f"Measured on 2 GPUs it is {of_ring}, from bracket to bracket" in projection
    assert f"with `selective` {more} times as many tokens on 2 GPUs" in projection
    assert f"with nothing recomputed {of_ring_with_all.replace('x', '')} times" in projection
    tiles = ends("h200x2_longest", "ulysses", SEGMENTS)
    steps = [(kept[0], none[0]), (full[0], kept[0]), (tiles, full[0])]
    selective, whole_layers, in_tiles = (
        f"{longer[0] / than[1]:.{n}f} to {longer[1] / than[0]:.{n}f} times"
        for n, (longer, than) in zip((1, 1, 2), steps, strict=True)
    )
    assert f"`selective` fits {selective} as many tokens as nothing recomputed" in projection
    assert (
        f"`full` {whole_layers} as many as `selective`, and the MLP in tiles {in_tiles} as many as that" in projection
    )


def test_projection_has_how_many_times_as_many_tokens_methods_fit_on_4_gpus():
    ulysses = ends("h200x4_longest_2", "ulysses", SEGMENTS)
    best, published = (ends("h200x4_longest_2", THEIRS, allocator) for allocator in (SEGMENTS, None))
    of_best, of_published = ((ulysses[0] / fails, ulysses[1] / fits) for fits, fails in (best, published))
    projection = " ".join((ROOT / "docs/PROJECTION.md").read_text().split())
    more, about = (
        "{:.1f} to {:.1f} times as many".format(*of_published),
        "{:.2f} to {:.2f} times as many".format(*of_best),
    )
    assert f"On 4 GPUs Ulysses fits {more} as `hf_deepspeed`" in projection
    assert f"overlap: {about}" in projection


# The tables of docs/METHODS.md under "The full training step" and "Every library on each kernel".

# Model, tokens and what is recomputed -> campaign, and what else is asked of its cells.
FULL_STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-4B, 16,384, `selective`": ("h200x2_step_methods_4", {"seq_len": 16384}),
    "Qwen3-4B, 32,768, `selective`": ("h200x2_step_methods_2", {}),
    "Qwen3-4B, 32,768, `full`": ("h200x2_step_methods", {**SHORT, "activation_checkpointing": "full"}),
    "Qwen3-4B, 65,536, `selective`": ("h200x2_step_methods_3", {}),
    "Qwen3-4B, 65,536, `full`": ("h200x2_step_methods", {"seq_len": 65536, "activation_checkpointing": "full"}),
    "Qwen3-4B, 131,072, `selective`": ("h200x2_step_long_2", LONG),
    "the same, another machine": ("h200x2_step_methods_4", LONG),
    "Llama-3-8B, 32,768, `selective`": ("h200x2_step_methods_6", {"activation_checkpointing": "selective"}),
    "Llama-3-8B, 32,768, `full`": ("h200x2_step_methods_6", {"activation_checkpointing": "full"}),
}


def full_steps(campaign_and_asked: tuple[str, dict[str, Any]]) -> list[Cell]:
    """Fastest first. Ulysses in chunks of heads is left out."""
    name, asked = campaign_and_asked
    found = ranked([each for each in campaign(name) if each.ok and is_asked(each, asked)])
    return [each for each in found if each.asked["head_chunks"] in (None, 1)]


def most_behind(steps: Iterable[Sequence[Cell]]) -> str:
    """By how much the slowest method is behind the fastest, at most."""
    return f"{100 * max(time_over(each[-1], each[0]) for each in steps) - 100:.1f}%"


def profiles(cell: Cell) -> list[Any]:
    """None of rows that are older than that."""
    return [row["kernel_ms"] for row in cell.measured if row["kernel_ms"] is not None]


def kernels_ms(cell: Cell, part: str, over_ranks: Callable[[Iterable[float]], float]) -> float:
    """Of the profiled step."""
    return median(over_ranks(rank[part] for rank in ranks) for ranks in profiles(cell))


def beside_ulysses() -> Iterator[tuple[Cell, Cell]]:
    """Ulysses and another method of the full steps that were profiled."""
    for steps in map(full_steps, FULL_STEPS.values()):
        (ulysses,) = (each for each in steps if each.asked["method"] == "ulysses")
        yield from ((ulysses, each) for each in steps if each is not ulysses and profiles(each))


def lines_of_full_steps() -> list[str]:
    lines = []
    for name, found in FULL_STEPS.items():
        for each in (steps := full_steps(found)):
            attention, sent = "-", "-"
            if profiles(each):
                attention = whole(kernels_ms(each, "attention", mean))
                sent = whole(kernels_ms(each, "exposed_messages", min))
            over = "" if each is steps[0] else ratio(each, steps[0])
            first = [name if each is steps[0] else "", words.method(each), ms(each), over, f"{each.mfu:.3f}"]
            lines.append(f"| {' | '.join([*first, attention, sent, gib(each), str(len(each.step_ms))])} |")
    return lines


def section(title: str) -> str:
    return (ROOT / "docs/METHODS.md").read_text("utf-8").split(f"{title}\n")[1].split("\n#")[0]


def table_below(title: str) -> list[str]:
    return [each for each in section(title).splitlines() if each.startswith("| ")][1:]


def test_methods_says_what_the_rows_give_of_the_full_step():
    title = "## The full training step"
    assert table_below(title) == lines_of_full_steps()
    most = most_behind([full_steps(each) for each in FULL_STEPS.values()])
    assert f"**The three tie, within {most}" in section(title)
    sent, attention = [], []
    for ulysses, other in beside_ulysses():
        sent.append(kernels_ms(ulysses, "exposed_messages", min) - kernels_ms(other, "exposed_messages", min))
        attention.append(kernels_ms(other, "attention", mean) - kernels_ms(ulysses, "attention", mean))
    said = " ".join(section(title).split())
    assert f"Of Ulysses {min(sent):.0f} to {max(sent):.0f} ms more of messages are not hidden" in said
    assert f"all-gather take {min(attention):.0f} to {max(attention):.0f} ms longer" in said


NUM_FIRST = 4  # steps of a window that came before any at the power cap
LIBRARIES = {  # below which title -> campaign, and what else is asked of its cells
    "### 131,072 tokens, 32/8 heads": ("h200x2_libraries_2", {"num_kv_heads": 8}),
    "### 131,072 tokens, 32/32 heads": ("h200x2_libraries_4", {"num_kv_heads": 32}),
    "### 32,768 tokens, 32/8 heads": ("h200x2_libraries_3", {"num_kv_heads": 8}),
    "### 32,768 tokens, 32/32 heads": ("h200x2_libraries_3", {"num_kv_heads": 32}),
}


def of_libraries(name: str, asked: dict[str, Any]) -> list[Cell]:
    """Ours and theirs, fastest first."""
    return ranked([each for each in campaign(name) if is_asked(each, asked)])


def lines_of_libraries(name: str, asked: dict[str, Any]) -> list[str]:
    """Of each: ms a step on each kernel, bytes sent, and peak memory on the first kernel it has."""
    found: dict[str, dict[str, Cell]] = {}
    for each in of_libraries(name, asked):
        found.setdefault(words.method(each), {})[each.asked["kernel"]] = each
    lines = []
    for library, on in sorted(found.items(), key=lambda item: any(cell.is_library for cell in item[1].values())):
        cells = [on.get(kernel["kernel"]) for kernel in (FA4, CUDNN, FA2)]
        there = [each for each in cells if each is not None]
        sent = shared(number((each.communication.counted_bytes or 0) / GIB) for each in there)
        times_ms = [number(each.median_step_ms or 0) if each is not None else "-" for each in cells]
        lines.append(f"| {' | '.join([library, *times_ms, sent, gib(there[0])])} |")
    return lines


@pytest.mark.parametrize("title", LIBRARIES)
def test_methods_says_what_the_rows_give_of_each_library_on_each_kernel(title):
    assert table_below(title) == lines_of_libraries(*LIBRARIES[title])


def of_each_column() -> Iterator[tuple[str, dict[str, str], Sequence[Cell], Cell]]:
    """Title, kernel, all cells, and the fastest of ours."""
    for title, (name, asked) in LIBRARIES.items():
        for kernel in KERNELS:
            cells = of_libraries(name, asked | kernel)
            yield title, kernel, cells, next(each for each in cells if not each.is_library)


def engines_rings() -> Iterator[float]:
    """TransformerEngine's ring over the fastest of ours, by column."""
    for *_, cells, ours in of_each_column():
        (ring,) = (each for each in cells if each.asked["variant"] == "p2p")
        yield time_over(ring, ours)


def within_fastest() -> str:
    """The fastest of ours, in the worst column."""
    most = max(time_over(ours, cells[0]) for *_, cells, ours in of_each_column())
    return f"or within {100 * most - 100:.1f}% of it"


def ring_behind() -> str:
    return f"at most {100 * max(engines_rings()) - 100:.1f}% behind"


def leads_within_a_tie(difference: Difference) -> bool:
    """Whether all of its interval is a lead, which is below what a report calls a difference."""
    return difference.paired is not None and difference.paired.interval.low > 1 and difference.outcome in NEAR


def tie_of_rings() -> str:
    """What all columns are by the reports' rule. On cuDNN, at 131,072 tokens, the intervals over our ring exclude 1."""
    assert max(engines_rings()) < 1 + SMALLEST
    for name in ("h200x2_libraries_2", "h200x2_libraries_4"):
        ours, theirs = cell(name, "ring", **CUDNN), cell(name, "transformer_engine", variant="p2p", **CUDNN)
        assert leads_within_a_tie(Difference(ours, theirs))
    return "ties by our rule, below 2%"


def test_methods_says_by_how_much_ours_and_the_next_library_are_behind_in_each_column():
    said = " ".join(section("## Every library on each kernel").split())
    num_columns = len([*of_each_column()])
    assert f"In each of the {num_columns} columns the fastest of ours is the fastest of all, {within_fastest()}" in said
    leads = [1 / over for over in engines_rings() if over < 1]
    assert f"in {len(leads)} columns it leads ours by up to {100 * max(leads) - 100:.1f}%" in said
    assert f"in the others it is {ring_behind()}. These are {tie_of_rings()}" in said


def far_behind() -> dict[tuple[str, str | None, str], dict[str, float]]:
    """Method, variant and kernel of libraries -> title -> over 1.1 times as long as the fastest of ours."""
    far: dict[tuple[str, str | None, str], dict[str, float]] = {}
    for title, kernel, cells, ours in of_each_column():
        for each in cells:
            if (over := time_over(each, ours)) > 1.1:
                key = (each.asked["method"], each.asked["variant"], kernel["kernel"])
                far.setdefault(key, {})[title] = over
    return far


def test_methods_says_which_libraries_are_far_behind():
    far, parallel = far_behind(), "torch_context_parallel"
    on_cudnn = far.pop(("transformer_engine", "all_gather", "cudnn"))
    on_fa4 = far.pop(("transformer_engine", "all_gather", "flash_attn_4"))
    two = [far.pop((parallel, variant, "cudnn")) for variant in ("alltoall", "allgather")]
    llama = far.pop(("ring_flash_attn_llama3", None, "flash_attn"))
    assert not far
    assert list(on_cudnn) == list(llama) == list(LIBRARIES)
    assert {tuple(each) for each in (on_fa4, *two)} == {("### 32,768 tokens, 32/32 heads",)}
    said = " ".join(section("## Every library on each kernel").split())
    short = "with 32/32 heads at 32,768 tokens"
    assert f"attention everywhere ({span(on_cudnn.values())}), and on FlashAttention-4 {short}" in said
    assert f"{short} ({span(on_fa4.values())}); - torch's context parallel" in said
    assert f"parallel {short} ({', '.join(span(each.values()) for each in two)})" in said
    assert f"whose shards are contiguous, everywhere ({span(llama.values())})" in said


def test_methods_says_how_far_replicates_of_libraries_differ_and_how_many_are_flagged():
    tables = {title: of_libraries(*each) for title, each in LIBRARIES.items()}
    long, long_32, short, *_ = tables.values()
    few = sum(len(each.step_ms) == 5 for each in long)
    words_of = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
    said = " ".join(section("### 131,072 tokens, 32/8 heads").split())
    assert {len(each.step_ms) for each in long} == {5, 6}
    assert f"of {words_of[few]} cells 5" in said
    assert f"are within {max(map(spread, long)):.1%} of each other" in said
    *repeated, llama = sorted(long_32, key=lambda each: len(each.step_ms), reverse=True)
    assert (llama.asked["method"], len(llama.step_ms)) == ("ring_flash_attn_llama3", 2)
    fives = [each for each in repeated if len(each.step_ms) == 5]
    assert {len(each.step_ms) for each in repeated} == {5, 6}
    assert {each.asked["kernel"] for each in fives} == {"flash_attn"}
    said = " ".join(section("### 131,072 tokens, 32/32 heads").split())
    assert f"{words_of[len(fives)].title()} cells on FlashAttention-2 have 5, and `llama3` has 2" in said
    assert f"are within {max(map(spread, long_32)):.1%} of each other" in said
    on_fa4 = [each for each in long_32 if is_asked(each, FA4)]
    assert f"On FlashAttention-4 {of_rows('transient', *on_fa4)} rows are flagged `transient`" in said
    assert {flag for each in on_fa4 for row in each.rows for flag in row["flags"]} == {"transient"}
    assert {flag for each in long_32 if each not in on_fa4 for row in each.rows for flag in row["flags"]} == set()
    both = [*long, *(each for each in campaign("h200x2_upipe") if is_asked(each, LONG))]
    told = " ".join((ROOT / "docs/CAMPAIGNS.md").read_text("utf-8").split())
    assert f"Six replicates of a cell of 131,072 tokens are within {max(map(spread, both)):.1%} of each other" in told
    said = " ".join(section("### 32,768 tokens, 32/8 heads").split())
    assert f"the replicates of a cell differ by up to {max(map(spread, short)):.1%}" in said
    doubtful = [each for each in campaign("h200x2_libraries_3") if each.asked["kernel"] != "flash_attn"]
    transient, disagrees, unsettled = (of_rows(f, *doubtful) for f in ("transient", "window_disagrees", "unsettled"))
    number_of, _, rows = transient.partition(" of ")
    assert f"of {rows} rows on these two kernels {number_of} are flagged `transient`" in said
    assert f"{disagrees.split(' of ')[0]} `window_disagrees` and {unsettled.split(' of ')[0]} `unsettled`" in said
    *_, last = tables.values()
    *others, ring, llama = sorted(last, key=spread)
    assert max(map(spread, others)) < max(map(spread, short))
    assert (ring.asked["variant"], ring.asked["kernel"]) == ("p2p", "cudnn")
    assert llama.asked["method"] == "ring_flash_attn_llama3"
    said = " ".join(section("### 32,768 tokens, 32/32 heads").split())
    assert f"ring on cuDNN by {spread(ring):.1%}, and `llama3` by {spread(llama):.0%}" in said


def test_steps_at_the_power_cap_are_as_long_and_as_late_as_methods_says():
    """Warm-up steps were not timed: each is taken to last as long as the first timed ones."""
    cells = [each for each in campaign("h200x2_libraries_3") if each.asked["kernel"] != "flash_attn"]
    rows = [row for each in cells for row in each.rows]
    begin, end, longest = [], [], []
    for row in rows:
        steps = list(row["step_ms"])
        typical = median(steps)
        late = [i for i, ms in enumerate(steps) if i > NUM_FIRST and ms > 1.08 * typical]
        if late:
            before = row["warmup_steps"] * median(steps[1:NUM_FIRST])
            begin.append((before + sum(steps[: late[0]])) / 1e3)
            end.append((before + sum(steps[: late[-1] + 1])) / 1e3)
            longest.append(max(steps) / typical)
    assert len(begin) > 0.95 * len(rows)
    said = f"about {median(longest):.1f}x as long from about {median(begin):.1f} to {median(end):.1f} s"
    assert said in " ".join(section("### 32,768 tokens, 32/8 heads").split())


def test_methods_says_that_it_is_the_same_on_h100s():
    found = [each for each in campaign("h100x2_libraries") if each.ok]

    def over_ours(method: str, kernel: dict[str, str], **asked: Any) -> float:
        ours = ranked([each for each in found if is_asked(each, kernel) and not each.is_library])[0]
        return time_over(cell("h100x2_libraries", method, **kernel, **asked), ours)

    engine = "transformer_engine"
    behind = max(over_ours(engine, kernel, variant="p2p") for kernel in KERNELS)
    gather = over_ours(engine, CUDNN, variant="all_gather")
    llama = over_ours("ring_flash_attn_llama3", FA2)
    said = " ".join(section("## Every library on each kernel").split())
    assert f"ring is at most {100 * behind - 100:.1f}% behind" in said
    assert f"its all-gather takes {gather:.2f}x as long as the fastest of ours, and `llama3` {llama:.2f}x" in said
    assert replicates(*found) == "1 to 2 replicates"
    assert "in one or two replicates (`h100x2_libraries`)" in said


UPIPES = (
    {"method": "ulysses", "head_chunks": 1},
    {"method": "ulysses", "head_chunks": 4},
    {"method": "upipe", "head_stages": 4},
    {"method": "upipe", "head_stages": None},
)


def upipe_beside_ulysses(**asked: Any) -> list[Cell]:
    """Ulysses, its 4 chunks, 4 stages, and one query head of each rank in a stage."""
    return [cell("h200x2_upipe", **each, **asked) for each in UPIPES]


def lines_of_upipe() -> list[str]:
    lines = []
    for length, heads in product((LONG, SHORT), (8, 32)):
        place = f"{whole(length['seq_len'])} tokens, 32/{heads} heads"
        ulysses, *_ = cells = upipe_beside_ulysses(num_kv_heads=heads, **length)
        for each in cells:
            over = "" if each is ulysses else ratio(each, ulysses)
            sent = number((each.communication.counted_bytes or 0) / GIB)
            first = [place if each is ulysses else "", words.method(each), number(each.median_step_ms or 0), over]
            lines.append(f"| {' | '.join([*first, gib(each), sent])} |")
    return lines


def test_methods_says_what_the_rows_give_of_stages_of_heads():
    title = "### What its stages save and cost"
    assert table_below(title) == lines_of_upipe()
    said = " ".join(section(title).split())
    long = [upipe_beside_ulysses(num_kv_heads=heads, **LONG) for heads in (8, 32)]

    def percent(shares: Iterable[float], digits: int = 0) -> str:
        low, high = sorted(shares)
        return f"{100 * low:.{digits}f} to {100 * high:.{digits}f}%"

    def held(each: Cell, ulysses: Cell) -> float:
        return (memory_gib(each) or 0) / (memory_gib(ulysses) or 1)

    chunks, four, one = ([Difference(cells[0], cells[i]) for cells in long] for i in (1, 2, 3))
    longer = [percent((each.ratio - 1 for each in pairs), 1) for pairs in (chunks, four, one)]
    holds = [percent(held(each.slow, each.fast) for each in pairs) for pairs in (four, one)]
    assert f"UPipe holds {holds[1]} of what Ulysses holds, and takes {longer[2]} longer" in said
    assert f"In 4 stages it holds {holds[0]} and takes {longer[1]} longer" in said
    assert f"They cost {longer[0]} at 131,072 tokens" in said
    short = [upipe_beside_ulysses(num_kv_heads=heads, **SHORT) for heads in (8, 32)]
    for ulysses, of_chunks, *_ in short:
        assert Difference(ulysses, of_chunks).outcome in NEAR
    grouped, full = (cells[-1] for cells in short)
    bound = [of_rows("host_bound", each) for each in (grouped, full)]
    assert f"in {bound[0]} rows with 32/8 heads and in {bound[1]} with 32/32 (`host_bound`)" in said
    assert of_rows("host_bound", *campaign("h200x2_upipe")).split(" of ")[0] == "7"
    assert f"replicates differ by up to {max(map(spread, (grouped, full))):.0%}" in said
    stages = [each for cells in long for each in cells[2:]]
    transient, _, rows = of_rows("transient", *stages).partition(" of ")
    assert f"Of {rows} rows of UPipe at 131,072 tokens {transient} are flagged `transient`" in said


# The tables of docs/PACKING.md under "What was measured".

NAMES = {
    ("ulysses", "contiguous"): "Ulysses",
    ("ring", "document_zigzag"): "document_zigzag ring",
    ("ring", "zigzag"): "zigzag ring",
    ("all_gather", "zigzag"): "zigzag all-gather",
    ("transformer_engine", "document_zigzag"): "TransformerEngine, `p2p`, document_zigzag",
    ("ring_flash_attn", "document_zigzag"): "ring-flash-attn, document_zigzag",
    ("ring_flash_attn_llama3", "contiguous"): "ring-flash-attn, `llama3`, 1 KV head at a time",
}
DRAWN = {(131072, 4096, 1.0): (2, 4, 8), (131072, 1024, 2.0): (2, 4, 8), (65536, 4096, 1.0): (2,)}


def packing() -> str:
    return (ROOT / "docs/PACKING.md").read_text("utf-8")


def columns_of(table: str) -> list[list[str]]:
    return [[column.strip() for column in text.split("|")[1:-1]] for text in table.splitlines()]


def table(heads: str) -> list[list[str]]:
    """The columns of each line of the one table whose head begins so."""
    (found,) = (paragraph for paragraph in packing().split("\n\n") if paragraph.startswith(heads))
    return columns_of(found)[2:]


TITLES = {
    "24 documents: lognormal, median 4,096, sigma 1": AROUND_4096,
    "33 documents: lognormal, median 1,024, sigma 2": FEW_LONG,
    "32 documents of 4,096 tokens": {"packing": "fixed"},
    "One document": {"packing": "none"},
}


def tables_under(title: str) -> list[tuple[str, list[list[str]]]]:
    """The words in bold that begin so, with what stands beside them; and of each the lines of the table below."""
    parts = packing().split("\n\n")
    found = [(head, below) for head, below in pairwise(parts) if head.startswith(f"**{title}")]
    return [
        (head, [[x.strip() for x in text.split("|")[1:-1]] for text in below.splitlines()]) for head, below in found
    ]


def lines_of_pack(pack: dict[str, Any], heads: Sequence[str], compute: Mapping[str, Any]) -> list[list[str]]:
    """What a table says of each method, the fastest first."""
    first, *others = ranked([each for each in campaign(PACKS) if is_asked(each, pack)])
    lines, fastest = [], "1" if pack["packing"] == "none" else "1, the fastest"
    for each in (first, *others):
        asked, exposed = each.asked, each.middle("exposed_comm_ms")
        chunks = f", {asked['head_chunks']} chunks" if (asked["head_chunks"] or 1) > 1 else ""
        of_ranks = zip(*(compute[row["trial_id"]] for row in each.measured), strict=True) if exposed else ()
        told = {
            "method": f"{NAMES[asked['method'], asked['layout']]}{chunks}",
            "ms a step": number(each.median_step_ms),
            "ratio": Difference(first, each).words if each is not first else fastest,
            "imbalance": f"{asked['flops_imbalance'] or 1:.2f}",  # null for one document, which is cut evenly
            "compute, ms a rank": ", ".join(f"{median(of_rank):.1f}" for of_rank in of_ranks),
            "exposed, ms": f"{exposed or 0:.1f}",
            "peak, GiB": gib(each),
        }
        lines.append([told[head] for head in heads])
    return lines


@pytest.mark.parametrize("title", TITLES)
def test_packing_says_what_the_rows_give_of_methods_on_2_gpus(title):
    compute = sp_bench.load([ROOT / "results" / PACKS]).set_index("trial_id").compute_only_rank_ms  # not in reports
    pack, tables = TITLES[title], tables_under(title)
    assert len(tables) == (2 if pack in (AROUND_4096, FEW_LONG) else 1)
    for kernel, (_, (heads, _, *lines)) in zip((FA4, FA2), tables, strict=False):
        assert lines == lines_of_pack(pack | kernel, heads, compute)
    share = of_one(cell(PACKS, "ulysses", head_chunks=1, **pack, **FA4), cell(PACKS, "ulysses", packing="none"))[0]
    assert title == "One document" or f"({share:.3f} of the work of one document)" in tables[0][0]


def test_packing_says_how_typical_its_packs_are():
    measured = {(each.asked["seq_len"], each.asked["document_len"]): f"{each.asked['flops_imbalance']:.2f}"
                for name in (PACKS, "h200x2_packed_step") for each in campaign(name)
                if is_asked(each, {"packing": "lognormal", "layout": "zigzag"})}  # fmt: skip
    lines = []
    for drawn, sizes in DRAWN.items():
        for ranks in sizes:
            packs = imbalances(ranks, *drawn)
            low, *_, high = quantiles(packs, n=20, method="inclusive")
            lines.append([str(ranks), measured[drawn[:2]] if ranks == 2 else "", f"{median(packs):.2f}",
                          f"{low:.2f} to {high:.2f}"])  # fmt: skip
    assert [each[1:] for each in table("| documents | ranks | the measured pack |")] == lines


ZIGZAG, CUT = {"layout": "zigzag"}, {"layout": "document_zigzag"}


def over_packs(values: Sequence[float], words: Callable[[float], str], of: int) -> str:
    count = "" if len(values) == of else f", {len(values)} packs"
    return f"{words(median(values))} ({words(min(values))} to {words(max(values))}){count}"


def test_packing_says_what_the_rows_give_of_other_packs():
    lines = []
    for packs in (draws(4096), draws(1024)):
        methods = ("ulysses", {"head_chunks": 1}), ("ring", CUT), ("ring", ZIGZAG)
        ratios = [[each for p in packs for each in p.over_chunks(method, **asked)] for method, asked in methods]
        even = over_packs([pack.imbalance for pack in packs], "{:.2f}".format, len(packs))
        lines.append([even, "1", *(over_packs(each, times, len(packs)) for each in ratios)])
        predicted = [(ring.asked["flops_imbalance"], p.imbalance) for p in packs for ring in p.of("ring", **ZIGZAG)]
        assert all(math.isclose(*each) for each in predicted)
    assert [each[1:] for each in table("| documents | imbalance of zigzag |")] == lines


def said_of_draws() -> Iterator[str]:
    packs = draws(4096) + draws(1024)
    behind = behind_fastest(packs)
    led = [time_over(p.cells[1], p.chunks) for p in packs if p.cells[0] is p.chunks]
    first, most = sum(each == 0 for each in behind), f"within {max(behind):.1%} of the fastest"
    yield f"or {most}, on all sixteen packs"
    by_more = sum(each >= 1.02 for each in led)
    yield f"is the fastest on {first} of the sixteen packs, by 2% or more on {by_more} of them, and {most} on the"

    steps = [[c.median_step_ms or 0 for c in (p.chunks, *p.of("ulysses", head_chunks=1))] for p in packs]
    *others, third, second, longest = sorted(steps)
    saved, of_long = ([one - chunks for chunks, one in each] for each in (others, (third, second, longest)))
    yield f"chunks save {min(saved):.1f} to {max(saved):.1f} ms of a step on {len(saved)} packs"
    yield f"the three with the longest steps ({third[0]:.0f} to {longest[0]:.0f} ms)"
    yield f"they save {max(of_long):.1f} ms at most, or cost up to {-min(of_long):.1f} ms"

    rings = sorted((p.imbalance, ratio) for p in packs for ratio in p.over_chunks("ring", **ZIGZAG))
    shares = f"{min(r / i for i, r in rings):.2f} to {max(r / i for i, r in rings):.2f}"
    yield f"The ring takes {shares} times its imbalance as long as Ulysses in 4 chunks"
    yield f"{shares} of its imbalance on all {len(rings)} packs that it ran"
    even, nearly, uneven = (
        [each for each in rings if low < each[0] <= high] for low, high in ((1, 1.08), (1.08, 1.1), (1.1, 2))
    )

    def span_of(found: Sequence[tuple[float, float]], digits: int) -> str:
        return " to ".join(f"{end([ratio for _, ratio in found]):.{digits}f}x" for end in (min, max))

    assert max(ratio for _, ratio in even) < 1.02, "no tie"
    yield f"it ties or leads up to {even[-1][0]:.2f}"
    yield f"takes {span_of(uneven, 2)} as long from {uneven[0][0]:.2f} on"
    yield f"On the {len(even)} packs with an imbalance of up to {even[-1][0]:.2f} it takes {span_of(even, 3)} as long"
    yield f"on {len(nearly)} packs with {shared(f'{i:.2f}' for i, _ in nearly)}, {span_of(nearly, 3)}"
    yield f"on {len(uneven)} packs from {uneven[0][0]:.2f} on, {span_of(uneven, 2)}"
    (ahead_at,) = [imbalance for imbalance, ratio in rings if ratio < 0.98]
    yield f"It leads by more than 2% on one pack, whose imbalance is {ahead_at:.2f}"

    cut = [ratio for p in packs for ratio in p.over_chunks("ring", **CUT)]
    yield f"It takes {min(cut):.2f}x to {max(cut):.2f}x as long as Ulysses in 4 chunks"
    both = [(p.imbalance, time_over(*p.of("ring", **ZIGZAG), *p.of("ring", **CUT)))
            for p in packs if p.of("ring", **ZIGZAG)]  # fmt: skip
    ahead = [imbalance for imbalance, ratio in both if ratio > 1]
    yield f"beats the zigzag ring on {len(ahead)} of {len(both)} packs, all with an imbalance of {min(ahead):.2f} or"

    typical = [median(imbalances(2, 131072, *drawn)) for drawn in ((4096, 1.0), (1024, 2.0))]
    here = [median(pack.imbalance for pack in draws(length)) for length in (4096, 1024)]
    yield f"their median imbalance is {here[0]:.2f}, where 1,000 packs have {typical[0]:.2f}"
    yield f"about as even as most ({here[1]:.2f} and {typical[1]:.2f})"
    flags = [each.flags for each in campaign(DRAWS)]
    transient, unsettled = (sum(name in each for each in flags) for name in ("transient", "unsettled"))
    yield f"{transient} rows are flagged `transient`, {unsettled} of them `unsettled` too"
    windows = [
        (each.rows[0]["step_ms"], each.median_step_ms or 1) for each in campaign(DRAWS) if "transient" in each.flags
    ]
    off = [100 * max(abs(ms / middle - 1) for ms in of_row) for of_row, middle in windows]
    yield f"the step that is furthest off is {min(off):.0f} to {max(off):.0f}% from the row's median"
    for pack in packs:
        if not pack.of("ring", **ZIGZAG):
            yield f"the zigzag ring on a pack of the first distribution with an imbalance of {pack.imbalance:.2f}"


def test_packing_says_in_words_what_the_rows_give_of_other_packs():
    text = " ".join(packing().replace("**", "").split())
    assert [said for said in said_of_draws() if said not in text] == []


def test_packing_says_what_the_rows_give_of_a_training_step():
    steps = [cell("h200x2_packed_step", method, layout=layout) for method, layout in STEPS]

    def of_ranks(step: Cell, part: str) -> str:
        times = zip(*([rank[part] for rank in row["kernel_ms"]] for row in step.measured), strict=True)
        return ", ".join(f"{median(of_rank):.0f}" for of_rank in times)

    assert table("| method | ms a step | ratio | imbalance | MFU |") == [
        [
            NAMES[step.asked["method"], step.asked["layout"]],
            ms(step),
            "1" if step is steps[0] else f"{time_over(step, steps[0]):.3f}x",
            f"{step.asked['flops_imbalance']:.2f}",
            f"{step.mfu:.3f}",
            of_ranks(step, "attention"),
            of_ranks(step, "exposed_messages"),
            gib(step),
        ]
        for step in steps
    ]


@pytest.mark.parametrize(
    ("name", "heads"),
    [("h100_packed", "| documents | longest | ms a step |"), ("h200_packed", "| documents | ms a step | TFLOP/s |")],
)
def test_packing_says_what_the_rows_give_of_kernels_on_1_gpu(name, heads):
    few_long, around, short, one = packs_of_one_gpu(name)
    digits = 0 if name == "h100_packed" else 1

    def columns(pack: Cell) -> list[str]:
        times = ", ".join(f"{each:,.{digits if pack is one else 1}f}" for each in pack.step_ms.values())
        rate = whole(attention_tflops(pack))
        longest = whole(pack.asked["longest_document"] or pack.asked["seq_len"])
        beside = [longest, times] if name == "h100_packed" else [times, rate]
        return [*beside, *(f"{share:.3f}".replace("1.000", "1") for share in of_one(pack, one))]

    assert [each[1:] for each in table(heads)] == [columns(pack) for pack in (one, few_long, around, short)]


def test_packing_says_in_words_what_the_rows_give():
    text = " ".join(packing().split())
    cut = cell(PACKS, "ring", layout="document_zigzag", **AROUND_4096, **FA2)
    methods = ("transformer_engine", "ring_flash_attn")
    engine, ring = (ratio(cell(PACKS, method, **AROUND_4096), cut) for method in methods)
    assert f"Beside our ring in the same layout it takes {engine}, which is a tie" in text
    assert f"sends twice as much as ours: {ring} of our ring's time" in text
    layouts = [[cell(PACKS, "ring", layout=layout, **pack, **FA4) for layout in ("zigzag", "document_zigzag")]
               for pack in (AROUND_4096, FEW_LONG)]  # fmt: skip
    assert f"It is {ratio(*layouts[0])} as fast as the zigzag ring where zigzag's work is uneven" in text
    assert f"It takes {ratio(*reversed(layouts[1]))} as long where that is nearly even" in text
    even = layouts[1][0].asked["flops_imbalance"]
    assert f"{share_as_even(2, 1024, 2.0, even):.0%} of such packs are as even" in text

    unpacked = cell("h200x2_step_methods", "ulysses", seq_len=65536, activation_checkpointing="selective")
    assert f"The same tokens as one document take {ms(unpacked)} ms with Ulysses" in text
    steps = [cell("h200x2_packed_step", method, layout=layout) for method, layout in STEPS]
    spread = max(max(step.step_ms.values()) / min(step.step_ms.values()) - 1 for step in steps)
    assert f"which differ by at most {math.ceil(1e3 * spread) / 10}%" in text
    shares = [
        100 * median(row["kernel_ms"][rank]["attention"] for row in step.measured) / (step.median_step_ms or 1)
        for step in steps
        for rank in range(2)
    ]
    assert f"which is now {min(shares):.0f} to {max(shares):.0f}% of a step" in text

    def beyond_work(name: str) -> list[float]:
        *packs, one = packs_of_one_gpu(name)
        return [100 * time / work - 100 for work, time in (of_one(pack, one) for pack in packs)]

    few_long, around, short = beyond_work("h100_packed")
    assert f"to within {math.ceil(max(few_long, around))}% for the two uneven packs" in text
    assert f"to within {short:.0f}% for 32 short documents" in text
    assert f"32 short documents take {beyond_work('h200_packed')[-1]:.0f}% more time than work" in text
    assert f"FlashAttention-2 on the H100 takes {short:.0f}% more" in text


RESERVED: list[tuple[str, str, list[dict[str, Any]]]] = [  # what a step is, its campaign, and the cells that are asked
    (
        "attention, 131,072 tokens, 32/8 heads, FlashAttention-4, 2 GPUs",
        "h200x2_headline",
        [
            {"method": "ulysses", "head_chunks": 1},
            {"method": "all_gather"},
            {"method": "ring", "exchange": "copy_engines"},
            {"method": "ring", "exchange": "collectives"},
        ],
    ),
    (
        "attention, 32,768 tokens, 32/32 heads, FlashAttention-4, 2 GPUs",
        "h200x2_libraries_3",
        [
            {"method": "ulysses", "head_chunks": 1, "num_kv_heads": 32, **FA4},
            {"method": "transformer_engine", "variant": "a2a", "num_kv_heads": 32, **FA4},
            {"method": "ring", "num_kv_heads": 32, **FA4},
            {"method": "transformer_engine", "variant": "p2p", "num_kv_heads": 32, **FA4},
        ],
    ),
    (
        "whole step of Qwen3-4B, 131,072 tokens, 2 GPUs",
        "h200x2_fit_2",
        [
            {"method": "ulysses", **LONG},
            {"method": "ring", **LONG},
        ],
    ),
    (
        "whole step of Qwen3-4B, 131,072 tokens, 4 GPUs, `expandable_segments`",
        "h200x4_step_methods_2",
        [
            {"method": "ulysses", "engine": "fsdp2", **LONG},
            {"method": "ring", "engine": "fsdp2", **LONG},
        ],
    ),
]


def reserved_gib(cell: Cell) -> float:
    """Of the rank that reserves most. A step that only asks whether it fits sends less."""
    return median(max(row["peak_reserved_bytes"]) for row in cell.rows if not row["fit"]) / GIB


def lines_of_reserved_memory() -> list[str]:
    lines = []
    for what, name, asked in RESERVED:
        for each in asked:
            found = cell(name, **each)
            by_torch = found.asked["method"] == "ring" and found.asked["exchange"] != "copy_engines"
            swaps_now = by_torch and found.asked["sp_size"] == 2
            first = [what if each is asked[0] else "", words.method(found) + (" before 5a35252" if swaps_now else "")]
            lines.append(f"| {' | '.join([*first, gib(found), f'{reserved_gib(found):.1f}'])} |")
    return lines


SHIFTS = [  # what was computed, and the campaigns before and after the ring's message was an all-to-all with one peer
    *(
        (f"attention, {whole(n)} tokens, 32/{heads} heads, FlashAttention-4", ("send", "alltoall"), n, heads)
        for n, heads in ((32768, 8), (32768, 32), (131072, 8))
    ),
    ("whole step of Qwen3-4B, 65,536 tokens, cuDNN", ("step_send", "step"), 65536, 8),
]


def shifts() -> Iterator[tuple[str, Cell, Cell]]:
    """What was computed, before and after."""
    for what, names, seq_len, heads in SHIFTS:
        before, after = (cell(f"h200x2_shift_{n}", "ring", seq_len=seq_len, num_kv_heads=heads) for n in names)
        yield what, before, after


def lines_of_shifts() -> Iterator[str]:
    for what, *both in shifts():
        for message, found in zip(("send and receive", "all-to-all with one peer"), both, strict=True):
            first = what if found is both[0] else ""
            numbers = [number(found.median_step_ms), gib(found), f"{reserved_gib(found):.1f}"]
            yield f"| {' | '.join([first, message, *numbers])} |"


def test_methods_says_what_torch_reserves_for_messages():
    title = "### What torch reserves for its messages"
    tables = [found.splitlines()[2:] for found in re.findall(r"(?:^\|.*\n)+", section(title), re.MULTILINE)]
    assert tables == [list(lines_of_shifts()), lines_of_reserved_memory()]
    attention = [each for _, *both in shifts() for each in both if each.asked["workload"] == "attention"]
    most = max(abs(time_over(after, before) - 1) for _, before, after in shifts())
    said = " ".join(section(title).split())
    within = max(spread(each) for each in attention)
    assert f"medians differ by at most {most:.1%}, and replicates of one cell by up to {within:.1%}" in said
    assert most < within
    short = [each for each in attention if each.asked["seq_len"] == 32768]
    assert of_rows("transient", *short) == "16 of 16"  # "all rows are flagged"
    assert {
        each.asked["seq_len"]: (each.options["workload.warmup_steps"], each.options["workload.timed_steps"])
        for each in attention
    } == {32768: (50, 20), 131072: (2, 4)}
    assert f"Attention: medians of {replicates(*attention)}" in said
    by_send, others = [], []
    sending = {"ring_flash_attn", "yunchang"}  # and our ring, before 5a35252
    for name, rings in (("h200x2_libraries_2", "ring"), ("h200x2_libraries_3", "ring"), ("h200x2_libraries_4", None)):
        for each in campaign(name):
            is_ring = each.asked["method"] in {rings, *sending} or each.asked["variant"] == "p2p"
            share = reserved_gib(each) / (memory_gib(each) or 1)
            (by_send if is_ring else others).append(share)
    said = " ".join(section(title).split())
    assert (
        f"Methods that send and receive reserve {min(by_send):.1f} to {max(by_send):.0f} times what they allocate."
        in said
    )
    assert f"All others reserve at most {math.ceil(100 * max(others)) / 100:.2f} times" in said
