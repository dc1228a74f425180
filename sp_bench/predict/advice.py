"""What to train with: the methods and memory options of a model on so many GPUs, by predicted step time and peak.

The predictions are those of projection.py and costs/memory. What they assume stands in ASSUMPTIONS, which every answer
shows with their errors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.config.trial import AttentionShape, MethodConfig, TrialConfig
from sp_bench.costs import memory, training
from sp_bench.costs.attention import head_split_reason
from sp_bench.formats import GIB, counted, number, whole
from sp_bench.predict.projection import (
    SPEED,
    Fit,
    Links,
    NotProjectable,
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
    extrapolated: bool  # more ranks than were measured, or over a network
    num_nodes: int
    rests_on: tuple[Cell, ...]  # the measured training steps with the same options
    peak_errors: tuple[float, ...]  # relative, of the memory model on those of them whose peak is known

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

    def as_json(self) -> dict[str, Any]:
        config = self.config
        return {
            "model": config.model.name,
            "gpus": config.world_size,
            "seq_len": config.seq_len,
            "method": config.method.name,
            "ulysses_degree": self.degrees[0],
            "ring_degree": self.degrees[1],
            **{short_name(path): value for path, value in zip(SPEED, step_options(config), strict=True)},
            "rests_on_cells": len(self.rests_on),
            "rests_on_campaigns": campaigns(self.rests_on),
            "step_ms": self.ms,
            "relative_error": self.band if math.isfinite(self.band) else None,  # None: not known
            "relative_error_is_of_other_options": not has_several_lengths(self.rests_on),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
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


def _candidate(fit: Fit, config: TrialConfig, degrees: tuple[int, int], cluster: Cluster) -> Candidate:
    nodes = cluster.gpus > cluster.gpus_per_node
    links = Links(fit.inside, cluster.network_gib_per_s * GIB if nodes else None, cluster.gpus_per_node)
    work = attention_work(config.method, config.kernel.name, config.attention_shape(config.seq_len), degrees, links)
    parameters = links.ms(training.sharding_traffic(config), 1, cluster.gpus)
    ms = max(step_ms(config, work, fit.rates), sum(parameters.values()))
    over_network = nodes and config.sp_size > cluster.gpus_per_node
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


def advice(found: Sequence[Candidate], cluster: Cluster) -> list[str]:
    """Five lines: what to use, what it needs, how fast, what comes next, how to measure it."""
    best, *others = best_and_others(found)
    second = others[0] if others else None
    beside = f", for {best.config.dp_shard_size} sequences side by side" if best.config.dp_shard_size > 1 else ""
    ratio = second and best.tokens_per_s_per_gpu / second.tokens_per_s_per_gpu
    tie = " (a tie, within the error)" if ratio is not None and abs(ratio - 1) < best.band else ""
    held = f"{best.peak_bytes / GIB:,.1f} of {cluster.memory_gib:,.1f} GiB a GPU"
    beyond = " (extrapolated)" if best.extrapolated else ""
    return [
        f"Use {best.named(' GPUs')}{beside}, with {in_words(step_options(best.config))}.",
        f"Memory: {held}; {_evidence_of_peak(best.peak_errors)}.",
        f"Step: {number(best.ms / 1e3)} s, {best.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, "
        f"+-{_share(best.band)}{beyond}; it rests on {_evidence(best.rests_on)}. {_error_of(best)}".rstrip(),
        "No other method fits."
        if second is None
        else f"Next: {second.named(' GPUs')}, {ratio:.3f}x the time a token{tie}, {second.peak_bytes / GIB:,.1f} GiB.",
        f"Measure it: sp-bench run {' '.join(best.overrides)}",
    ]


def _error_of(best: Candidate) -> str:
    if has_several_lengths(best.rests_on) or not math.isfinite(best.band):
        return ""
    return "These options have one length: the error is that of others."


def _share(band: float) -> str:
    return f"{band:.0%}" if math.isfinite(band) else "?"


def table(found: Sequence[Candidate]) -> str:
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
            "extrapolated" if each.extrapolated else "",
        )
        for each in found
    ]
    right = ("right", "right", "left", "left", "right", "right", "right", "right", "left")
    return tabulate(lines, heads, disable_numparse=True, colalign=right)


def evidence(found: Sequence[Candidate]) -> str:
    """Which training steps the predictions rest on, by their options."""
    heads = ("rests on training steps with", "cells", "tokens", "GPUs", "campaigns", "error is that of")
    of_options = {in_words(step_options(each.config)): each.rests_on for each in found}
    lines = [
        (
            options,
            len(cells),
            _range(cells, "seq_len"),
            _range(cells, "sp_size"),
            ", ".join(campaigns(cells)),
            _OF[has_several_lengths(cells)],
        )
        for options, cells in sorted(of_options.items())
    ]
    return tabulate(lines, heads, disable_numparse=True, colalign=("left", *["right"] * 3, "left", "left"))


_OF = {True: "all options", False: "other options: these have one length"}


def _evidence(cells: Sequence[Cell]) -> str:
    """3 cells with these options, of 16,384 to 32,768 tokens on 1 to 2 GPUs."""
    ranks = _range(cells, "sp_size")
    where = f"{_range(cells, 'seq_len')} tokens on {ranks} GPU{'' if ranks == '1' else 's'}"
    return f"{counted(len(cells), 'cell')} with these options, of {where}"


def _evidence_of_peak(errors: Sequence[float]) -> str:
    if not errors:
        return "no cell with these options says how wrong that is"
    largest = max(map(abs, errors))
    return f"such predictions were within {largest:.1%} of {counted(len(errors), 'measured cell')} with these options"


def evidence_of_map(fit: Fit, kernel: str) -> str:
    """Which cells of attention the map rests on."""
    cells = [cell for cell in fit.attention if cell.asked["kernel"] == kernel]
    return (
        f"Its rates rest on {counted(len(fit.attention), 'cell')} of attention. {len(cells)} have this kernel, of "
        f"{_range(cells, 'seq_len')} tokens on {_range(cells, 'sp_size')} GPUs, from {', '.join(campaigns(cells))}."
    )


def _range(cells: Sequence[Cell], column: str) -> str:
    found = [cell.asked[column] for cell in cells]
    return " to ".join(dict.fromkeys([whole(min(found)), whole(max(found))]))


def campaigns(cells: Sequence[Cell]) -> list[str]:
    return sorted({str(row["folder"]) for cell in cells for row in cell.rows})


def _given(value: Any) -> str:
    """A value in command-line notation."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def errors(fit: Fit) -> str:
    """The errors of predictions for rows that were left out of the fit."""
    heads = ("left out of the fit", "cells", "median error", "9 of 10 within", "largest", "which")
    lines = [
        (e.what, len(e.errors), f"{e.median:.1%}", f"{e.of_most:.1%}", f"{e.largest:.1%}", e.worst) for e in fit.errors
    ]
    return tabulate(lines, heads, disable_numparse=True, colalign=("left", *["right"] * 4, "left"))


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
