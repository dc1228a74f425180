"""What to train with: the methods and memory options of a model on so many GPUs, by predicted step time and peak.

The predictions are those of projection.py and costs/memory. What they assume stands in ASSUMPTIONS, which every answer
shows with their errors.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from sp_bench.analysis import words
from sp_bench.config.machine import LinkConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory, training
from sp_bench.costs.attention import head_split_reason
from sp_bench.formats import GIB, cost_text, counted, number, text_table, whole
from sp_bench.predict.fitted import OneRankStep, network_gib_per_s
from sp_bench.predict.projection import (
    SPEED,
    Basis,
    Fit,
    Links,
    NotProjectable,
    StepOptions,
    Work,
    attention_work,
    has_several_lengths,
    in_words,
    step_ms,
    step_options,
    with_options,
)
from sp_bench.rows.names import short_name

# What keeps most first: it computes least again.
CHECKPOINTING = ("none", "selective_mlp", "selective", "selective_output", "full")
SPARE = 0.95  # of a device's memory: the context, NCCL and what an allocator cannot use take the rest
ASSUMPTIONS = (
    "Each group of P GPUs trains on one sequence of its own, and all GPUs share the parameters (fsdp2). Ulysses groups "
    "are adjacent GPUs. Each GPU has a network card of its own: a ring's hop to another node uses one of them, "
    "collectives use all of a node's. Parameters travel beside the computing."
)


class NothingFits(NotProjectable):
    """No way to train fits in memory."""


@dataclass(frozen=True)
class Candidate:
    """One way to train, with its prediction."""

    config: TrialConfig
    degrees: tuple[int, int]  # (ulysses, ring)
    ms: float
    peak_bytes: float
    band: float  # relative error of `ms` to reckon with
    extrapolated: bool  # from fewer ranks, or over a network; never where one rank of as many ran
    num_nodes: int
    rests_on: tuple[Basis, ...]  # the measured training steps with the same options
    peak_errors: tuple[float, ...]  # relative, of the memory model on those of them whose peak is known
    one_rank: OneRankStep | None = None  # whose time and peak these are; None: predicted by the fit

    @property
    def tokens_per_s_per_gpu(self) -> float:
        tokens = self.config.num_sequences * self.config.seq_len
        return 1e3 * tokens / self.ms / self.config.world_size

    @property
    def method(self) -> str:
        return self.named()

    def named(self, unit: str = "") -> str:
        """`USP over 8 GPUs (2 x 4)`."""
        name, (ulysses, ring) = self.config.method.name, self.degrees
        if name == "single":
            return "one GPU a sequence"
        split = f" ({ulysses} x {ring})" if name == "usp" else ""
        return f"{words.METHODS[name]} over {ulysses * ring}{unit}{split}"

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command line that measures it."""
        config = self.config
        made = [
            f"workload={config.workload.name}",
            f"engine={config.engine.name}",
            f"model={config.model.name}",
            f"kernel={config.kernel.name}",
            f"hardware={config.hardware.name}",
            f"fabric={config.fabric.name if self.num_nodes == 1 else 'network'}",
            *([f"num_nodes={self.num_nodes}"] if self.num_nodes > 1 else []),
            f"method={config.method.name}",
            f"sp_size={config.sp_size}",
            f"dp_shard_size={config.dp_shard_size}",
            f"seq_len={config.seq_len}",
            f"dtype={config.dtype}",
            *(f"{path}={_given(value)}" for path, value in zip(SPEED[1:], step_options(config)[1:], strict=True)),
        ]
        return [*made, *([f"method.ulysses_degree={self.degrees[0]}"] if config.method.name == "usp" else [])]

    @property
    def gpu_hours(self) -> float:
        """Of a million tokens."""
        return 1e6 / self.tokens_per_s_per_gpu / 3600

    def as_json(self, price: float | None = None) -> dict[str, Any]:
        """price: of a GPU-hour."""
        config = self.config
        return {
            "model": config.model.name,
            "gpus": config.world_size,
            "seq_len": config.seq_len,
            "method": config.method.name,
            "ulysses_degree": self.degrees[0],
            "ring_degree": self.degrees[1],
            **{short_name(path): value for path, value in zip(SPEED, step_options(config), strict=True)},
            "evidence": "one_rank" if self.one_rank else "projected",
            "rests_on_cells": self.one_rank.num_cells if self.one_rank else len(self.rests_on),
            "rests_on_campaigns": list(self.one_rank.campaigns) if self.one_rank else campaigns(self.rests_on),
            "step_ms": self.ms,
            "relative_error": self.band if math.isfinite(self.band) else None,  # None: not known
            "relative_error_is_of_other_options": not self.one_rank and not has_several_lengths(self.rests_on),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "gpu_hours_per_million_tokens": self.gpu_hours,
            "cost_per_million_tokens": None if price is None else price * self.gpu_hours,
            "peak_allocated_bytes": self.peak_bytes,
            "extrapolated": self.extrapolated,
            "overrides": self.overrides,
        }


@dataclass(frozen=True)
class Cluster:
    gpus: int
    gpus_per_node: int
    network_gib_per_s: float  # of one GPU to other nodes
    memory_gib: float  # of one GPU


def candidates(
    fit: Fit, config: TrialConfig, cluster: Cluster, checkpointing: Sequence[str] = CHECKPOINTING
) -> list[Candidate]:
    """All ways to train `config`'s model at its length that fit into memory, with its kernel and with options that
    training steps were measured with; the most tokens/s first.

    Raises:
        NothingFits: the message names the way that needs least.
        NotProjectable: the kernel has no rows, or no training step that recomputes so has.
    """
    _require_kernel(fit, config.kernel.name)
    measured = [options for options in fit.steps if options[0] == config.kernel.name]
    ways = [options for options in measured if options[1] in checkpointing]
    if not ways:
        raise NotProjectable(
            f"no training step of fsdp2 on kernel={config.kernel.name} that recomputes {' or '.join(checkpointing)} is "
            f"among the rows; {_those_with_rows(fit, config.kernel.name)}, or name a campaign that has some"
        )
    made = [
        _candidate(fit, each, degrees, cluster)
        for options in ways
        for each, degrees in _ways(with_options(config, options), cluster)
        if each.method.name in fit.methods
    ]
    limit = SPARE * cluster.memory_gib * GIB
    fitting = [each for each in made if each.peak_bytes <= limit]
    if not fitting:
        least = min(made, key=lambda each: each.peak_bytes)
        raise NothingFits(
            f"nothing fits: {config.model.name} at {whole(config.seq_len)} tokens on {cluster.gpus} GPUs needs "
            f"{least.peak_bytes / GIB:,.1f} GiB a GPU at least ({least.method}, "
            f"{in_words(step_options(least.config))}), and {limit / GIB:,.1f} of "
            f"{cluster.memory_gib:,.1f} GiB can be used; use more GPUs or a shorter sequence"
        )
    return sorted(fitting, key=lambda each: -each.tokens_per_s_per_gpu)


def best_of_each_method(found: Sequence[Candidate]) -> list[Candidate]:
    """The fastest way of each method with `preferred` options, or with any options if none of these fits; the most
    tokens/s first. So methods are compared on the same options.

    found: the most tokens/s first.
    """
    options = step_options(preferred(found).config)
    best: dict[str, Candidate] = {}
    for each in sorted(found, key=lambda each: step_options(each.config) != options):
        best.setdefault(each.config.method.name, each)
    return sorted(best.values(), key=lambda each: -each.tokens_per_s_per_gpu)


def preferred(found: Sequence[Candidate]) -> Candidate:
    """The recommended way: among those that tie with the fastest within its error, the one whose options were measured
    in most cells, then the fastest.

    found: the most tokens/s first.
    """
    fastest = found[0]
    error = fastest.band if math.isfinite(fastest.band) else 0.0  # an unknown error makes no tie
    tied = [each for each in found if fastest.tokens_per_s_per_gpu / each.tokens_per_s_per_gpu - 1 <= error]
    return max(tied, key=lambda each: len(each.rests_on))


def best_and_others(found: Sequence[Candidate]) -> list[Candidate]:
    """The recommended way, then the best of each other method, the most tokens/s first."""
    best = preferred(found)
    return [best, *(each for each in best_of_each_method(found) if each.config.method.name != best.config.method.name)]


def _those_with_rows(fit: Fit, kernel: str) -> str:
    here = sorted({str(options[1]) for options in fit.steps if options[0] == kernel})
    if here:
        return f"rows have {', '.join(here)}"
    kernels = sorted({str(options[0]) for options in fit.steps})
    return f"rows of training steps have kernel {', '.join(kernels)}" if kernels else "no training step is"


def _ways(config: TrialConfig, cluster: Cluster) -> Iterator[tuple[TrialConfig, tuple[int, int]]]:
    """All ways to train with the options in `config`."""
    shape = config.attention_shape(config.seq_len)
    sizes = [2**n for n in range(cluster.gpus.bit_length()) if cluster.gpus % 2**n == 0]
    for size in sizes:
        for method, degrees in _methods(shape, size, cluster.gpus_per_node):
            yield replace(config, method=method, sp_size=size, dp_shard_size=cluster.gpus // size), degrees


def _methods(shape: AttentionShape, size: int, node: int) -> Iterator[tuple[MethodConfig, tuple[int, int]]]:
    """The methods that can split the sequence over `size` ranks. Zigzag layouts need two tokens per rank."""
    if size == 1:
        yield MethodConfig("single"), (1, 1)
        return
    if head_split_reason(shape, size, "sp_size", "ulysses") is None:
        yield MethodConfig("ulysses"), (size, 1)
    if shape.seq_len < 2 * size:
        return
    yield MethodConfig("ring", "zigzag", dkv_dtype="input"), (1, size)
    yield MethodConfig("all_gather", "zigzag", dkv_dtype="input"), (1, size)
    for ulysses in [2**n for n in range(1, node.bit_length())]:
        if ulysses < size and head_split_reason(shape, ulysses, "ulysses_degree", "usp") is None:
            yield MethodConfig("usp", "zigzag", None, ulysses, "ulysses_inner", "input"), (ulysses, size // ulysses)


def links_of(fit: Fit, cluster: Cluster) -> Links:
    nodes = cluster.gpus > cluster.gpus_per_node
    return Links(fit.inside, cluster.network_gib_per_s * GIB if nodes else None, cluster.gpus_per_node)


def works_of(config: TrialConfig, degrees: tuple[int, int], links: Links) -> dict[str, Work]:
    """The attention of layers of each kind."""
    return {
        kind: attention_work(
            config.method, config.kernel.name, config.attention_shape(config.seq_len, kind), degrees, links
        )
        for kind in config.kinds
    }


def _candidate(fit: Fit, config: TrialConfig, degrees: tuple[int, int], cluster: Cluster) -> Candidate:
    links = links_of(fit, cluster)
    works = works_of(config, degrees, links)
    parameters = links.ms(training.sharding_traffic(config), 1, cluster.gpus)
    ms = max(step_ms(config, works, fit.rates), sum(parameters.values()))
    over_network = config.sp_size > cluster.gpus_per_node  # then there are several nodes
    return Candidate(
        config,
        degrees,
        ms,
        memory.peak(config).bytes,
        fit.band(True, max(config.sp_size, 1)),
        over_network or config.world_size > fit.ranks,
        math.ceil(cluster.gpus / cluster.gpus_per_node),
        fit.steps[step_options(config)],
        fit.peak_errors[step_options(config)],
    )


ALWAYS = ("ulysses", "ring", "all_gather")  # methods that every answer names
SAME_NETWORK = 0.15  # a link is the one that was asked for if it carries as much within this share


def as_one_rank(
    found: Sequence[Candidate], steps: Sequence[OneRankStep], error: float, cluster: Cluster
) -> list[Candidate]:
    """The ways to train one sequence over all GPUs that rows of one real rank have, with their times and peaks: of
    the options that most methods have. None of fewer than two methods, which would compare nothing.

    error: relative, of such times. Most tokens/s first.
    """
    by_options: dict[StepOptions, dict[str, Candidate]] = {}
    for each in found:
        for step in steps if _is_over_all(each, cluster) else ():
            if _is_of(step, each, cluster) and step.peak_gib <= SPARE * cluster.memory_gib:
                band = error if each.num_nodes == 1 else max(error, each.band)  # it was held on NVLink alone
                made = replace(each, ms=step.step_ms, peak_bytes=step.peak_gib * GIB, band=band)
                made = replace(made, extrapolated=False, one_rank=step)
                here = by_options.setdefault(step.options, {})
                here[step.method] = min(here.get(step.method, made), made, key=lambda one: one.ms)
    best = max(by_options.values(), key=lambda here: (len(here), -min(one.ms for one in here.values())), default={})
    return sorted(best.values(), key=lambda one: one.ms) if len(best) > 1 else []


def _is_of(step: OneRankStep, each: Candidate, cluster: Cluster) -> bool:
    config, network = each.config, step.network_gib_per_s
    return (network is None or _is_near(network, cluster)) and step == replace(
        step,
        model=config.model.name,
        hardware=config.hardware.name,
        method=config.method.name,
        ulysses_degree=each.degrees[0],
        ring_degree=each.degrees[1],
        world_size=config.sp_size * config.dp_shard_size,
        num_nodes=each.num_nodes,
        seq_len=config.seq_len,
        options=step_options(config),
    )


def _is_near(network_gib_per_s: float, cluster: Cluster) -> bool:
    return abs(network_gib_per_s / cluster.network_gib_per_s - 1) <= SAME_NETWORK


def link_of(cluster: Cluster, links: Sequence[LinkConfig]) -> str:
    """The name of the link that models the cluster's: nvlink on one node, else one whose network carries as much.

    Raises:
        NotProjectable: there is none; the message has those that there are.
    """
    if cluster.gpus <= cluster.gpus_per_node:
        return "nvlink"
    networks = {link.name: network for link in links if (network := network_gib_per_s(link)) is not None}
    near = [name for name, network in networks.items() if _is_near(network, cluster)]
    if not near:
        known = ", ".join(f"{name} ({network:.0f} GiB/s)" for name, network in networks.items())
        raise NotProjectable(
            f"no file of conf/link has {cluster.network_gib_per_s:g} GiB/s of a GPU to other nodes, within "
            f"{SAME_NETWORK:.0%}; there are {known}; use --network of one of these, write such a file, or leave out "
            "--measure, for the fit alone"
        )
    return min(near, key=lambda name: abs(networks[name] - cluster.network_gib_per_s))


MOST_S = 60  # predicted seconds of a step that --measure runs whole; of a longer one it runs 2 and 4 layers


def to_measure(found: Sequence[Candidate], cluster: Cluster, link: str) -> list[list[str]]:
    """The overrides that run Ulysses, the ring and the all-gather over all GPUs as one real rank, with the options of
    the recommended way."""
    options = step_options(preferred(found).config)
    over_all = [each for each in found if _is_over_all(each, cluster) and step_options(each.config) == options]
    runs = []
    for each in over_all:
        if each.config.method.name in ALWAYS:
            layers = ["model.num_layers=2,4"] if each.ms > 1e3 * MOST_S else []
            once = ["workload.warmup_steps=0", "workload.timed_steps=1", "workload.single_step=true"]
            few = ["workload.warmup_steps=1", "workload.timed_steps=3"]
            one = ["world=one_rank", f"link={link}", "isolation=group", "hardware.allocator=expandable_segments"]
            runs.append([*each.overrides, *one, *layers, *(once if layers else few)])
    return runs


def advice(
    found: Sequence[Candidate], cluster: Cluster, ones: Sequence[Candidate] = (), price: float | None = None
) -> list[str]:
    """What to use, what it needs, how fast, what a million tokens take, Ulysses, the ring and the all-gather over all
    GPUs and side by side, and how to measure it.

    ones: of `as_one_rank`. They say which method, where one sequence over all GPUs is what to use; whether it is says
    the fit, since times of two kinds are not compared.
    """
    best = preferred(found)
    over_all = [each for each in found if _is_over_all(each, cluster)]
    if ones and over_all and _ties(best, over_all[0]):
        best = ones[0]
    group = (
        ones
        if best.one_rank
        else [each for each in found if _is_over_all(each, cluster) == _is_over_all(best, cluster)]
    )
    tied = [
        each
        for each in _of_each(group, best).values()
        if each.config.method != best.config.method and _ties(each, best)
    ]
    tie = (
        f" (a tie with {words.listed_words([words.METHODS[each.config.method.name] for each in tied])})" if tied else ""
    )
    beside = f", for {best.config.dp_shard_size} sequences side by side" if best.config.dp_shard_size > 1 else ""
    beyond = " (extrapolated)" if best.extrapolated else ""
    held = f"{best.peak_bytes / GIB:,.1f} of {cluster.memory_gib:,.1f} GiB a GPU"
    lines = [
        f"Use {best.named(' GPUs')}{tie}{beside}, with {in_words(step_options(best.config))}.",
        f"Memory: {held}; {'its peak as one real rank' if best.one_rank else _evidence_of_peak(best.peak_errors)}.",
        f"Step: {number(best.ms / 1e3)} s, {best.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, a million tokens in "
        f"{number(best.gpu_hours)} {cost_text(best.gpu_hours, price)}, "
        f"+-{_share(best.band)}{beyond}; {_rests_on(best)}",
    ]
    if cluster.gpus > 1:
        lines.append(f"One sequence over {cluster.gpus} GPUs: {_named(ones or over_all, over_all, best, cluster.gpus)}")
        side_by_side = [each for each in found if not _is_over_all(each, cluster)]
        by = ", by the fit" if best.one_rank else ""
        alone = _named(side_by_side, [], best, 2) if cluster.gpus > 2 else _on_one_gpu(side_by_side, best)
        lines.append(f"Sequences side by side{by}: {alone}")
    return [*lines, f"Measure it: sp-bench run {' '.join(best.overrides)}"]


def _is_over_all(each: Candidate, cluster: Cluster) -> bool:
    return each.config.sp_size == cluster.gpus


def _ties(a: Candidate, b: Candidate) -> bool:
    """Within the error of either; with an unknown one nothing ties."""
    error = max(band for each in (a, b) if math.isfinite(band := each.band)) if math.isfinite(a.band + b.band) else 0.0
    return abs(a.tokens_per_s_per_gpu / b.tokens_per_s_per_gpu - 1) <= error


def _of_each(ways: Sequence[Candidate], best: Candidate) -> dict[str, Candidate]:
    """Each method of ALWAYS at its fastest, with the options of `best` where it has them."""
    found = {}
    for method in ALWAYS:
        here = [each for each in ways if each.config.method.name == method]
        same = [each for each in here if step_options(each.config) == step_options(best.config)]
        if here:
            found[method] = max(same or here, key=lambda each: each.tokens_per_s_per_gpu)
    return found


def _named(ways: Sequence[Candidate], others: Sequence[Candidate], best: Candidate, sp_size: int) -> str:
    """Each method of ALWAYS by `ways`; those without any by `others`, which are of the fit. sp_size: the fewest GPUs of
    a sequence."""
    shape = best.config.attention_shape(best.config.seq_len)
    splits = head_split_reason(shape, sp_size, "sp_size", "ulysses") is None
    here, fitted = _of_each(ways, best), _of_each(others, best)
    told = []
    for method in ALWAYS:
        if method in here:
            told.append(_beside(here[method], best))
        elif method in fitted:
            told.append(f"{_beside(fitted[method], best)}, by the fit")
        elif method == "ulysses" and not splits:
            told.append(f"Ulysses cannot split {shape.num_heads} heads over {sp_size} GPUs")
        else:
            told.append(f"{words.METHODS[method]} does not fit")
    return "; ".join(told) + "."


def _on_one_gpu(ways: Sequence[Candidate], best: Candidate) -> str:
    """Two GPUs have a sequence each."""
    same = [each for each in ways if step_options(each.config) == step_options(best.config)] or ways
    return f"{_beside(same[0], best)}." if same else "no sequence fits on one GPU."


def _beside(each: Candidate, best: Candidate) -> str:
    """Ulysses 5.10 s, 38.9 GiB, a tie."""
    name = words.METHODS[each.config.method.name] if each.config.dp_shard_size == 1 else each.named()
    parts = [f"{name}: {number(each.ms / 1e3)} s", f"{each.peak_bytes / GIB:,.1f} GiB"]
    if step_options(each.config) != step_options(best.config):
        parts.append(f"with {in_words(step_options(each.config))}")
    if (each.one_rank is None) == (best.one_rank is None) and each != best:  # times of two kinds are not compared
        ratio = best.tokens_per_s_per_gpu / each.tokens_per_s_per_gpu
        parts.append("a tie" if _ties(each, best) else f"{ratio:.2f}x the time a token")
    return ", ".join(parts)


def _rests_on(best: Candidate) -> str:
    if best.one_rank is None:
        return f"it rests on {_evidence(best.rests_on)}. {_error_of(best)}".rstrip()
    step = best.one_rank
    line = " by the line over {} and {} layers".format(*step.layers) if step.layers else ""
    return f"one real rank of {step.world_size}{line}, messages as {step.link} ({', '.join(step.campaigns)})."


def _error_of(best: Candidate) -> str:
    if has_several_lengths(best.rests_on) or not math.isfinite(best.band):
        return ""
    return "These options have one length: the error is that of others."


def _share(band: float) -> str:
    return f"{band:.0%}" if math.isfinite(band) else "?"


def table(found: Sequence[Candidate], width: int | None = None) -> str:
    """The predictions. width: as of `text_table`."""
    heads = ("GPUs", "tokens", "method", "options", "step, s", "+-", "tokens/s/GPU", "peak GiB", "")
    lines = [
        (
            whole(each.config.world_size),
            whole(each.config.seq_len),
            each.method,
            in_words(step_options(each.config)),
            number(each.ms / 1e3),
            _share(each.band),
            f"{each.tokens_per_s_per_gpu:,.0f}",
            f"{each.peak_bytes / GIB:,.1f}",
            "one real rank" if each.one_rank else "extrapolated" if each.extrapolated else "",
        )
        for each in found
    ]
    right = ("right", "right", "left", "left", "right", "right", "right", "right", "left")
    return text_table(heads, lines, width, colalign=right)


def evidence(found: Sequence[Candidate], width: int | None = None) -> str:
    """Which training steps the predictions rest on, by their options."""
    heads = ("rests on training steps with", "cells", "tokens", "GPUs", "campaigns", "error is that of")
    of_options = {in_words(step_options(each.config)): each.rests_on for each in found if not each.one_rank}
    lines = [
        (
            options,
            len(cells),
            _range(cell.seq_len for cell in cells),
            _range(cell.sp_size for cell in cells),
            ", ".join(campaigns(cells)),
            _OF[has_several_lengths(cells)],
        )
        for options, cells in sorted(of_options.items())
    ]
    ones = sorted({name for each in found if each.one_rank for name in each.one_rank.campaigns})
    of_ones = f"\n\nSteps of one real rank are of {', '.join(ones)}." if ones else ""
    return text_table(heads, lines, width, colalign=("left", *["right"] * 3, "left", "left")) + of_ones


_OF = {True: "all options", False: "other options: these have one length"}


def _evidence(cells: Sequence[Basis]) -> str:
    """3 cells with these options, of 16,384 to 32,768 tokens on 1 to 2 GPUs."""
    ranks = _range(cell.sp_size for cell in cells)
    where = f"{_range(cell.seq_len for cell in cells)} tokens on {ranks} GPU{'' if ranks == '1' else 's'}"
    return f"{counted(len(cells), 'cell')} with these options, of {where}"


def _evidence_of_peak(errors: Sequence[float]) -> str:
    if not errors:
        return "no cell with these options says how wrong that is"
    largest = max(map(abs, errors))
    return f"such predictions were within {largest:.1%} of {counted(len(errors), 'measured cell')} with these options"


def evidence_of_map(fit: Fit, kernel: str) -> str:
    """Which cells of attention the map rests on."""
    cells = [cell for cell in fit.attention if cell.kernel == kernel]
    tokens, ranks = _range(cell.seq_len for cell in cells), _range(cell.sp_size for cell in cells)
    return (
        f"Its rates rest on {counted(len(fit.attention), 'cell')} of attention. {len(cells)} have this kernel, of "
        f"{tokens} tokens on {ranks} GPUs, from {', '.join(campaigns(cells))}."
    )


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    return " to ".join(dict.fromkeys([whole(found[0]), whole(found[-1])]))


def campaigns(cells: Sequence[Basis]) -> list[str]:
    return sorted({name for cell in cells for name in cell.campaigns})


def _given(value: Any) -> str:
    """A value in command-line notation."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def errors(fit: Fit, width: int | None = None) -> str:
    """The errors of predictions for rows that were left out of the fit."""
    heads = ("left out of the fit", "cells", "median error", "9 of 10 within", "largest", "which")
    lines = [
        (e.what, len(e.errors), f"{e.median:.1%}", f"{e.of_most:.1%}", f"{e.largest:.1%}", e.worst) for e in fit.errors
    ]
    return text_table(heads, lines, width, colalign=("left", *["right"] * 4, "left"))


def _require_kernel(fit: Fit, kernel: str) -> None:
    if kernel not in fit.kernels:
        raise NotProjectable(f"kernel={kernel} has no rows here; use one of {', '.join(fit.kernels)}")


MAP_RANKS = (2, 4, 8, 16, 32, 64)
MAP_TOKENS = (8192, 32768, 131072)  # a GPU
MAP_HEADS = ((32, 8), (32, 32), (64, 8))
MAP_NETWORKS = (None, 50.0, 25.0, 10.0)  # GiB/s of a GPU to other nodes; None: all GPUs on one node


def decision_map(fit: Fit, kernel: str, gpus_per_node: int) -> str:
    """The fastest method of attention, by heads, tokens a GPU, network and ranks; in bold with its lead over the next
    method where that is beyond the error."""
    _require_kernel(fit, kernel)
    heads = ("heads", "tokens a GPU", "to other nodes", *(f"{ranks} GPUs" for ranks in MAP_RANKS))
    lines = []
    for num_heads, num_kv_heads in MAP_HEADS:
        for tokens in MAP_TOKENS:
            for network in MAP_NETWORKS:
                links = Links(fit.inside, None if network is None else network * GIB, gpus_per_node)
                row = [f"{num_heads}/{num_kv_heads}", whole(tokens), f"{network:g} GiB/s" if network else "one node"]
                for ranks in MAP_RANKS:
                    shape = AttentionShape(1, tokens * ranks, num_heads, num_kv_heads, 128, True, "bfloat16")
                    times = {
                        (method.name, degrees): fit.rates.attention_ms(
                            attention_work(method, kernel, shape, degrees, links)
                        )
                        for method, degrees in _methods(shape, ranks, gpus_per_node)
                        if method.name in fit.methods
                    }
                    ranked = sorted(times.items(), key=lambda item: item[1])
                    (name, (ulysses, ring)), ms = ranked[0]
                    other = next((each for (method, _), each in ranked if method != name), ms)
                    shown = f"USP {ulysses}x{ring}" if name == "usp" else words.METHODS[name]
                    row.append(f"**{shown}** {other / ms:.2f}x" if other / ms > 1 + fit.band(False, 1) else shown)
                lines.append(row)
    return tabulate(lines, heads, disable_numparse=True, tablefmt="pipe")
