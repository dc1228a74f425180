"""The ways to train a model on so many GPUs, and the one to use: methods and memory options by predicted step time and
peak. The predictions are those of projection.py and costs/memory, or times of one real rank.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sp_bench.analysis import words
from sp_bench.config.machine import LinkConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory, nccl, training
from sp_bench.costs.attention import head_split_reason
from sp_bench.formats import GIB, span, whole
from sp_bench.predict.fitted import OneRankStep, network_gib_per_s
from sp_bench.predict.projection import (
    METHODS,
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
ALLOCATOR = "expandable_segments"  # of all ways; torch's own leaves more in pieces, and less fits


class NothingFits(NotProjectable):
    """No way to train fits in memory."""


@dataclass(frozen=True)
class Candidate:
    """One way to train, with its prediction."""

    config: TrialConfig
    degrees: tuple[int, int]  # (ulysses, ring)
    ms: float
    peak_bytes: float
    usable_bytes: float  # of a GPU's memory, by tensors
    band: float  # relative error of `ms` to reckon with
    extrapolated: bool  # from fewer ranks, or over a network; never where one rank of as many ran
    num_nodes: int
    rests_on: tuple[Basis, ...]  # the measured training steps with the same options
    peak_errors: tuple[float, ...]  # relative, of the memory model on those of them whose peak is known
    hardware: str  # of the command that measures it
    one_rank: OneRankStep | None = None  # whose time and peak these are; None: predicted by the fit
    short: tuple[float, float] | None = None  # shares, at least and at most, by which such times were all too short

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
    def error(self) -> str:
        """`+-10%`; `2.6% to 4.4% short`; `+-?` where nobody knows."""
        if self.short:
            return f"{span(self.short, '{:.1%}'.format)} short"
        return f"+-{self.band:.0%}" if math.isfinite(self.band) else "+-?"

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command line that measures it."""
        config = self.config
        made = [
            f"workload={config.workload.name}",
            f"engine={config.engine.name}",
            f"model={config.model.name}",
            f"kernel={config.kernel.name}",
            f"hardware={self.hardware}",
            f"hardware.allocator={ALLOCATOR}",
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
    def host_bytes(self) -> float:
        """Memory of each host that its ranks fill with what is offloaded, by the memory model."""
        return memory.held_on_host_bytes(self.config) / self.num_nodes

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of a million tokens."""
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
            "too_short_by": self.short,  # shares, at least and at most; None: the error is to both sides
            "relative_error_is_of_other_options": not self.one_rank and not has_several_lengths(self.rests_on),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "gpu_hours_per_million_tokens": self.gpu_hours,
            "cost_per_million_tokens": None if price is None else price * self.gpu_hours,
            "peak_allocated_bytes": self.peak_bytes,
            "usable_bytes": self.usable_bytes,
            "host_bytes": self.host_bytes,
            "extrapolated": self.extrapolated,
            "overrides": self.overrides,
        }


@dataclass(frozen=True)
class Cluster:
    gpus: int
    gpus_per_node: int
    network_gib_per_s: float  # of one GPU to other nodes
    memory_gib: float  # of one GPU
    hardware: str | None = None  # of the command that measures it; None: that of the rows


def candidates(
    fit: Fit, config: TrialConfig, cluster: Cluster, checkpointing: Sequence[str] = CHECKPOINTING
) -> list[Candidate]:
    """All ways to train `config`'s model at its length that fit into memory, with its kernel and with options that
    training steps were measured with; the most tokens/s first.

    Raises:
        NothingFits: the message names the way that needs least.
        NotProjectable: the kernel has no rows, or no training step that recomputes so has, or none of such layers has.
    """
    require_kernel(fit, config.kernel.name)
    _require_softmax_over_keys(config)
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
    fitting = [each for each in made if each.peak_bytes <= each.usable_bytes]
    if not fitting:
        least = min(made, key=lambda each: each.peak_bytes)
        raise NothingFits(
            f"nothing fits: {config.model.name} at {whole(config.seq_len)} tokens on {cluster.gpus} GPUs needs "
            f"{least.peak_bytes / GIB:,.1f} GiB a GPU at least ({least.method}, "
            f"{in_words(step_options(least.config))}), and tensors can take "
            f"{least.usable_bytes / GIB:,.1f} of {cluster.memory_gib:,.1f} GiB; use more GPUs or a shorter sequence"
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
    in most cells, then the fastest. Of ways that need host memory only where there are no others, since nobody says how
    much of it there is.

    found: the most tokens/s first.
    """
    usable = [each for each in found if not each.host_bytes] or found
    fastest = usable[0]
    error = fastest.band if math.isfinite(fastest.band) else 0.0  # an unknown error makes no tie
    tied = [each for each in usable if fastest.tokens_per_s_per_gpu / each.tokens_per_s_per_gpu - 1 <= error]
    return max(tied, key=lambda each: len(each.rests_on))


def recommended(found: Sequence[Candidate], ones: Sequence[Candidate]) -> Candidate:
    """The first of `ones`, of `as_one_rank`, where the fit, which knows all ways, prefers none that is faster than the
    same way by more than the errors; else what the fit prefers. Times of two kinds are not compared."""
    best = preferred(found)
    return ones[0] if ones and ties(best, by_fit(ones[0], found)) else best


def by_fit(each: Candidate, found: Sequence[Candidate]) -> Candidate:
    """The same way, as the fit predicts it."""
    return next(way for way in found if (way.config, way.degrees) == (each.config, each.degrees))


def error_of_two(a: Candidate, b: Candidate) -> float:
    """The larger error; 0 where one is not known."""
    return max(a.band, b.band) if math.isfinite(a.band + b.band) else 0.0


def ties(a: Candidate, b: Candidate) -> bool:
    return abs(a.tokens_per_s_per_gpu / b.tokens_per_s_per_gpu - 1) <= error_of_two(a, b)


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
        for method, degrees in able_methods(shape, size, cluster.gpus_per_node):
            yield replace(config, method=method, sp_size=size, dp_shard_size=cluster.gpus // size), degrees


def able_methods(shape: AttentionShape, size: int, node: int) -> Iterator[tuple[MethodConfig, tuple[int, int]]]:
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


def _outside_allocator(config: TrialConfig, degrees: tuple[int, int], cluster: Cluster) -> nccl.Held:
    """What of NCCL's a rank has, as methods.closed_forms says of a trial."""
    ulysses, ring = degrees
    sends = ring > 1 and "send_recv" in METHODS[config.method.name]
    return nccl.counts(ulysses, min(cluster.gpus, cluster.gpus_per_node), sends=sends)


def _candidate(fit: Fit, config: TrialConfig, degrees: tuple[int, int], cluster: Cluster) -> Candidate:
    links = links_of(fit, cluster)
    works = works_of(config, degrees, links)
    parameters = links.ms(training.sharding_traffic(config), 1, cluster.gpus)
    ms = max(step_ms(config, works, fit.rates), sum(parameters.values()))
    rests_on = fit.steps[step_options(config)]
    over_network = config.sp_size > cluster.gpus_per_node  # then there are several nodes
    return Candidate(
        config,
        degrees,
        ms,
        memory.peak(config).bytes,
        nccl.usable_bytes(cluster.memory_gib * GIB, _outside_allocator(config, degrees, cluster), ALLOCATOR),
        fit.band(True, config.sp_size, one_length=not has_several_lengths(rests_on)),
        over_network or config.world_size > fit.ranks,
        math.ceil(cluster.gpus / cluster.gpus_per_node),
        rests_on,
        fit.peak_errors[step_options(config)],
        cluster.hardware or config.hardware.name,
    )


ALWAYS = ("ulysses", "ring", "all_gather")  # methods that every answer names
SAME_NETWORK = 0.15  # a link is the one that was asked for if it carries as much within this share


def as_one_rank(
    found: Sequence[Candidate], steps: Sequence[OneRankStep], errors: Sequence[float], cluster: Cluster
) -> list[Candidate]:
    """The ways to train one sequence over all GPUs that rows of one real rank have, with their times and peaks: of
    the options that most methods have. None of one method alone, which would compare nothing, unless no other fits.

    errors: relative, of such times, the lowest first; without any there is no answer. Most tokens/s first.
    """
    if not errors:
        return []
    error, short = max(map(abs, errors)), (-errors[-1], -errors[0])
    by_options: dict[StepOptions, dict[str, Candidate]] = {}
    for each in found:
        for step in steps if is_over_all(each, cluster) else ():
            if _is_of(step, each, cluster) and step.peak_gib * GIB <= each.usable_bytes:
                is_held = each.num_nodes == 1  # rows check steps on NVLink alone
                made = replace(each, ms=step.step_ms, peak_bytes=step.peak_gib * GIB, extrapolated=False, one_rank=step)
                made = replace(made, band=error if is_held else max(error, each.band))
                made = replace(made, short=short if is_held and short[0] > 0 else None)
                here = by_options.setdefault(step.options, {})
                here[step.method] = min(here.get(step.method, made), made, key=lambda one: one.ms)
    if not by_options:
        return []
    options, best = max(by_options.items(), key=lambda item: (len(item[1]), -min(one.ms for one in item[1].values())))
    alike = [each for each in found if is_over_all(each, cluster) and step_options(each.config) == options]
    others = {each.config.method.name for each in alike} & {*ALWAYS} - best.keys()
    return sorted(best.values(), key=lambda one: one.ms) if len(best) > 1 or not others else []


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
    the recommended way. They name the hardware of the rows, beside which they are read."""
    options = step_options(preferred(found).config)
    over_all = [each for each in found if is_over_all(each, cluster) and step_options(each.config) == options]
    runs = []
    for each in over_all:
        if each.config.method.name in ALWAYS:
            layers = ["model.num_layers=2,4"] if each.ms > 1e3 * MOST_S else []
            once = ["workload.warmup_steps=0", "workload.timed_steps=1", "workload.single_step=true"]
            few = ["workload.warmup_steps=1", "workload.timed_steps=3"]
            one = ["world=one_rank", f"link={link}", "isolation=group"]
            of_rows = replace(each, hardware=each.config.hardware.name)
            runs.append([*of_rows.overrides, *one, *layers, *(once if layers else few)])
    return runs


def is_over_all(each: Candidate, cluster: Cluster) -> bool:
    return each.config.sp_size == cluster.gpus


def campaigns(cells: Sequence[Basis]) -> list[str]:
    return sorted({name for cell in cells for name in cell.campaigns})


def _given(value: Any) -> str:
    """A value in command-line notation."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _require_softmax_over_keys(config: TrialConfig) -> None:
    model = config.model
    if model.kv_lora_rank is not None or "delta" in model.kinds:
        layers, steps = "layers of kind delta", "docs/LATENT.md has steps of one real rank"
        if model.kv_lora_rank is not None:
            layers, steps = "latents", "sp-bench run sweep=one_rank_latent_steps measures steps of one real rank"
        raise NotProjectable(f"model={model.name}: no row that the fit rests on has {layers}; {steps}")


def require_kernel(fit: Fit, kernel: str) -> None:
    if kernel not in fit.kernels:
        raise NotProjectable(f"kernel={kernel} has no rows here; use one of {', '.join(fit.kernels)}")
