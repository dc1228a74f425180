"""Advice in words: what to train with, and the tables of what it rests on. What the predictions assume stands in
ASSUMPTIONS, which every answer shows with their errors.
"""

import math
from collections.abc import Sequence

from sp_bench.analysis import words
from sp_bench.costs import nccl
from sp_bench.costs.attention import head_split_reason
from sp_bench.formats import GIB, cost_text, counted, number, span, text_table, whole
from sp_bench.predict.candidates import (
    ALLOCATOR,
    ALWAYS,
    Candidate,
    Cluster,
    by_fit,
    campaigns,
    error_of_two,
    is_over_all,
    recommended,
    ties,
)
from sp_bench.predict.projection import SPEED, Basis, Fit, has_several_lengths, in_words, step_options

ASSUMPTIONS = (
    "Each group of P GPUs trains on one sequence of its own, and all GPUs share the parameters (fsdp2). Ulysses groups "
    "are adjacent GPUs. Each GPU has a network card of its own: a ring's hop to another node uses one of them, "
    "collectives use all of a node's. Parameters travel beside the computing."
)


def advice(
    found: Sequence[Candidate],
    cluster: Cluster,
    ones: Sequence[Candidate] = (),
    price: float | None = None,
    missing: str = "",
) -> list[str]:
    """What to use, what it needs, how fast, what a million tokens take, what may be faster, each method over all GPUs
    and side by side, and how to measure it.

    ones: of `as_one_rank`. missing: why this machine cannot run the kernel.
    """
    best = recommended(found, ones)
    over_all = [each for each in found if is_over_all(each, cluster)]
    group = (
        ones if best.one_rank else [each for each in found if is_over_all(each, cluster) == is_over_all(best, cluster)]
    )
    tied = [
        each for each in _of_each(group, best).values() if each.config.method != best.config.method and ties(each, best)
    ]
    named = words.listed_words([words.METHODS[each.config.method.name] for each in tied])
    tie = f", {named} {_not_told_apart(max(error_of_two(each, best) for each in tied))}" if tied else ""
    beside = f", for {best.config.dp_shard_size} sequences side by side" if best.config.dp_shard_size > 1 else ""
    beyond = " (extrapolated)" if best.extrapolated else ""
    evidence = "its peak as one real rank" if best.one_rank else _evidence_of_peak(best.peak_errors)
    lines = [
        f"Use {best.named(' GPUs')}{tie}{beside}, with {in_words(step_options(best.config))}.",
        f"Memory: {_held(best, cluster)}; {evidence}.",
        f"Step: {number(best.ms / 1e3)} s, {best.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, a million tokens in "
        f"{number(best.gpu_hours)} {cost_text(best.gpu_hours, price)}, "
        f"{'such steps were ' if best.short else ''}{best.error}{beyond}; {_rests_on(best)}",
        *_of_other_layers(best),
        *_faster(found, best),
    ]
    if cluster.gpus > 1:
        same = by_fit(best, found)
        ways = ones if best.one_rank else over_all
        lines.append(f"One sequence over {cluster.gpus} GPUs: {_named(ways, over_all, best, same, cluster.gpus)}.")
        if ones and not best.one_rank:
            ran = [f"{_beside(each, best)} ({each.error})" for each in ones]
            lines.append(f"As one real rank: {'; '.join(ran)}.")
        side_by_side = [each for each in found if not is_over_all(each, cluster)]
        by = ", by the fit" if best.one_rank else ""
        several = [_named(side_by_side, [], best, same, 2)] if cluster.gpus > 2 else []
        lines.append(f"Sequences side by side{by}: {'; '.join([_on_one_gpu(side_by_side, best), *several])}.")
    return [*lines, *([f"Not on this machine: {missing}."] if missing else []), _how_to_measure(best)]


def _of_other_layers(best: Candidate) -> list[str]:
    """What the errors of the fit say nothing of."""
    others = sorted({*best.config.model.kinds} - {"full"})
    if not others:
        return []
    return [
        "The fit rests on models whose layers are all full; its errors do not cover layers of kind "
        f"{words.listed_words(others)}."
    ]


def _held(best: Candidate, cluster: Cluster) -> str:
    """71.6 of 73.7 GiB that tensors can take of a GPU of 79.2 (...): tight."""
    taken, usable = best.peak_bytes, best.usable_bytes
    tight = ": tight" if taken > nccl.TIGHT / nccl.TENSORS_SHARE[ALLOCATOR] * usable else ""
    return (
        f"{taken / GIB:,.1f} of {usable / GIB:,.1f} GiB that tensors can take of {cluster.memory_gib:,.1f} a GPU "
        f"(CUDA's context, NCCL and fragments take the rest){tight}{_on_host(best)}"
    )


def _on_host(each: Candidate) -> str:
    return f", and {each.host_bytes / GIB:,.0f} GiB of each host's memory" if each.host_bytes else ""


def _faster(found: Sequence[Candidate], best: Candidate) -> list[str]:
    """The fastest way by the fit, if it is ahead of `best` by more than the fit's errors, or needs host memory."""
    fastest, same = found[0], by_fit(best, found)
    ahead = fastest.tokens_per_s_per_gpu / same.tokens_per_s_per_gpu
    if ahead <= 1 + (same.band if fastest.host_bytes else error_of_two(fastest, same)):
        return []
    equal = [each for each in found if step_options(each.config) == step_options(fastest.config)]
    there = [each for each in equal if each.config.sp_size == best.config.sp_size and ties(each, fastest)]
    way = (there or equal)[0]
    return [
        f"Faster by the fit: {way.named(' GPUs')}, with {_other_options(way, best)}: {number(way.ms / 1e3)} s, "
        f"{way.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, {way.error}; {way.peak_bytes / GIB:,.1f} GiB a GPU"
        f"{_on_host(way)}; it rests on {_evidence(way.rests_on)}."
    ]


def _not_told_apart(error: float) -> str:
    return f"not told apart (within {error:.0%})"


def _of_each(ways: Sequence[Candidate], best: Candidate) -> dict[str, Candidate]:
    """Each method of ALWAYS at its fastest, with the options of `best` where it has them; and USP where a sequence
    leaves a host, since it can be ahead of all there."""
    found, gpus_per_node = {}, best.config.world_size // best.num_nodes
    for method in (*ALWAYS, "usp"):
        here = [each for each in ways if each.config.method.name == method]
        here = [each for each in here if method != "usp" or each.config.sp_size > gpus_per_node]
        same = [each for each in here if step_options(each.config) == step_options(best.config)]
        on_device = [each for each in here if not each.host_bytes]
        if here:
            found[method] = max(same or on_device or here, key=lambda each: each.tokens_per_s_per_gpu)
    return found


def _named(
    ways: Sequence[Candidate], fitted: Sequence[Candidate], best: Candidate, same: Candidate, sp_size: int
) -> str:
    """Each method by `ways`; those without any by `fitted`, with the fit's time of `same`, the way that `best` is.
    sp_size: the fewest GPUs of a sequence."""
    shape = best.config.attention_shape(best.config.seq_len)
    splits = head_split_reason(shape, sp_size, "sp_size", "ulysses") is None
    here, of_fit = _of_each(ways, best), _of_each(fitted, best)
    parts = []
    for method in (*ALWAYS, *({"usp"} & {*here, *of_fit})):
        if method in here:
            parts.append(_beside(here[method], best))
        elif method in of_fit:
            there = f"{words.METHODS[same.config.method.name]} at {number(same.ms / 1e3)} s"
            parts.append(f"{_beside(of_fit[method], best)}, by the fit, which has {there}")
        elif method == "ulysses" and not splits:
            parts.append(f"Ulysses cannot split {shape.num_heads} heads over {sp_size} GPUs")
        else:
            parts.append(f"{words.METHODS[method]} does not fit")
    return "; ".join(parts)


def _on_one_gpu(ways: Sequence[Candidate], best: Candidate) -> str:
    """Each GPU has a sequence of its own."""
    alone = [each for each in ways if each.config.sp_size == 1]
    same = [each for each in alone if step_options(each.config) == step_options(best.config)] or alone
    return _beside(same[0], best) if same else "no sequence fits on one GPU"


def _beside(each: Candidate, best: Candidate) -> str:
    """Ulysses: 5.18 s, 38.9 GiB, not told apart (within 4%); Ulysses over 2, 4 at once: 20.8 s, 104.6 GiB."""
    sequences = each.config.dp_shard_size
    plain = sequences == 1 and each.config.method.name != "usp"
    name = words.METHODS[each.config.method.name] if plain else each.named()
    name += f", {sequences} at once" if sequences > 1 else ""
    on_host = f" and {each.host_bytes / GIB:,.0f} on each host" if each.host_bytes else ""
    parts = [f"{name}: {number(each.ms / 1e3)} s", f"{each.peak_bytes / GIB:,.1f} GiB{on_host}"]
    if step_options(each.config) != step_options(best.config):
        parts.append(f"with {_other_options(each, best)}")
    if (each.one_rank is None) == (best.one_rank is None) and each != best:  # times of two kinds are not compared
        slower = best.tokens_per_s_per_gpu / each.tokens_per_s_per_gpu
        ratio = f"{slower:.2f}x the time a token" if slower > 1 else f"{1 / slower:.2f}x the tokens/s"
        parts.append(_not_told_apart(error_of_two(each, best)) if ties(each, best) else ratio)
    return ", ".join(parts)


def _other_options(each: Candidate, best: Candidate) -> str:
    """The options in which a way differs from `best`; all of them, where one that differs is not set."""
    pairs = zip(SPEED, step_options(each.config), step_options(best.config), strict=True)
    differ = [words.of_step(path, value) for path, value, of_best in pairs if value != of_best]
    return ", ".join(differ) if all(differ) else in_words(step_options(each.config))


def _how_to_measure(best: Candidate) -> str:
    made, is_of_rows = " ".join(best.overrides), best.hardware == best.config.hardware.name
    if best.num_nodes == 1:
        where = "(hardware= as yours is)" if is_of_rows else "on the machine that has such GPUs"
        return f"Measure it {where}: sp-bench run {made}"
    where = "hardware= as yours is" if is_of_rows else "hardware= by name where you submit without such GPUs"
    return f"Measure it on {best.num_nodes} hosts ({where}; docs/CLUSTER.md): sp-bench submit {made} --cluster mine"


def _rests_on(best: Candidate) -> str:
    if best.one_rank is None:
        return f"it rests on {_evidence(best.rests_on)}. {_error_of(best)}".rstrip()
    step = best.one_rank
    line = " by the line over {} and {} layers".format(*step.layers) if step.layers else ""
    return f"one real rank of {step.world_size}{line}, messages as {step.link} ({', '.join(step.campaigns)})."


def _error_of(best: Candidate) -> str:
    if has_several_lengths(best.rests_on) or not math.isfinite(best.band):
        return ""
    return "These options have one length: the error is the largest of others."


def table(found: Sequence[Candidate], width: int | None = None) -> str:
    """The predictions. width: as of `text_table`."""
    heads = ("GPUs", "tokens", "method", "options", "step, s", "error", "tokens/s/GPU", "peak GiB", "")
    lines = [
        (
            whole(each.config.world_size),
            whole(each.config.seq_len),
            each.method,
            in_words(step_options(each.config)),
            number(each.ms / 1e3),
            each.error,
            f"{each.tokens_per_s_per_gpu:,.0f}",
            f"{each.peak_bytes / GIB:,.1f}",
            ("one real rank" if each.one_rank else "extrapolated" if each.extrapolated else "") + _on_host(each),
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
            span(cell.seq_len for cell in cells),
            span(cell.sp_size for cell in cells),
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
    ranks = span(cell.sp_size for cell in cells)
    where = f"{span(cell.seq_len for cell in cells)} tokens on {ranks} GPU{'' if ranks == '1' else 's'}"
    return f"{counted(len(cells), 'cell')} with these options, of {where}"


def _evidence_of_peak(errors: Sequence[float]) -> str:
    if not errors:
        return "no cell with these options says how wrong that is"
    largest = max(map(abs, errors))
    return f"such predictions were within {largest:.1%} of {counted(len(errors), 'measured cell')} with these options"


def errors(fit: Fit, width: int | None = None) -> str:
    """The errors of predictions for rows that were left out of the fit."""
    heads = ("left out of the fit", "cells", "median error", "9 of 10 within", "largest", "which")
    lines = [
        (e.what, len(e.errors), f"{e.median:.1%}", f"{e.of_most:.1%}", f"{e.largest:.1%}", e.worst) for e in fit.errors
    ]
    return text_table(heads, lines, width, colalign=("left", *["right"] * 4, "left"))
