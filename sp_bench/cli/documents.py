"""Helpers of templates that need more than a report may import: the fit of `project`, searches, and the memory model.

Each takes the cells of all campaigns first, which `templates.Rows` gives it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.limits import limits
from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory, nccl
from sp_bench.formats import GIB, whole
from sp_bench.hardware import device_bytes
from sp_bench.planning import overrides, sweep
from sp_bench.planning.search import Search
from sp_bench.predict import candidates, projection, streams
from sp_bench.predict.decision_map import decision_map as map_of_methods
from sp_bench.report.table import Column, unpadded

HARDWARE = "h200"
KERNELS = "h200x1_stream_kernels"


def fit(cells: Sequence[Cell]) -> projection.Fit:
    """What `project` and `advise` rest on."""
    return projection.fit(cells, HARDWARE)


def num_longer(_: Sequence[Cell], of: projection.Fit) -> int:
    """Training steps that are longer than the one of their options from which they were predicted."""
    several = [steps for steps in of.steps.values() if projection.has_several_lengths(steps)]
    return sum(step.seq_len > min(each.seq_len for each in steps) for steps in several for step in steps)


def decision_map(_: Sequence[Cell], of: projection.Fit) -> str:
    """The table of `project --map --kernel cudnn`."""
    return map_of_methods(of, "cudnn", 8)


def longest_projected(_: Sequence[Cell]) -> list[list[TrialConfig]]:
    """The steps at which searches of the sweep `longest_projected` begin: a list for each set of options and method."""
    lines: dict[object, list[TrialConfig]] = {}
    for search in sweep.read(overrides.read_arguments(["sweep=longest_projected"])).searches:
        config, workload = search.config, search.config.workload
        tiles = workload.activation_checkpointing, workload.loss_tile_tokens, workload.mlp_tile_tokens
        options = (*tiles, workload.checkpoint_offload, config.engine.optimizer_offload, config.method)
        lines.setdefault(options, []).append(search.at(search.guess(None, None, None)))
    return list(lines.values())


def host_gib(_: Sequence[Cell], config: TrialConfig) -> float:
    """What a step holds in the memory of each host, by the memory model."""
    return memory.held_on_host_bytes(config) / GIB


@dataclass(frozen=True)
class Peaks:
    """How far the memory model is from measured training steps of one engine: relative errors, the smallest first."""

    errors: Sequence[float]
    ranks: Sequence[int]
    tokens: Sequence[int]  # of a GPU

    @property
    def median(self) -> float:
        return median(self.errors)

    @property
    def span(self) -> str:
        """16,384, 32,768; of more than two lengths 2,048 to 151,552."""
        ends = dict.fromkeys((self.tokens[0], self.tokens[-1]))
        return (", " if len(set(self.tokens)) == 2 else " to ").join(map(whole, ends))


def peaks(cells: Sequence[Cell], engine: str, but: tuple[str, str] | None = None) -> Peaks:
    """The errors of all rows on GPUs of which the model speaks. but: campaign and kernel of rows that are left out."""
    found = []
    for cell in (each for each in cells if each.asked["workload"] == "train_step" and each.asked["engine"] == engine):
        for row in (each for each in cell.rows if each["status"] == "ok"):
            config, measured = parse(TrialConfig, json.loads(row["config"])), row["max_peak_allocated_bytes"]
            known = measured and memory.unmodelled_reason(config) is None
            if known and (row["folder"], config.kernel.name) != but:
                error = abs(memory.peak_of_row(config, row).bytes / measured - 1)
                found.append((error, config.world_size, config.seq_len // config.sp_size))
    return Peaks(*map(sorted, zip(*found, strict=True)))


class Longest(NamedTuple):
    config: TrialConfig  # where a search begins, by the memory model
    ends: Sequence[Cell]  # what fits and what does not, or nothing


LONGEST: tuple[Column[Longest], ...] = (
    Column("method", lambda of: _method(of.config)),
    Column("GPUs", lambda of: of.config.sp_size),
    Column("MLP", lambda of: "in tiles" if of.config.workload.mlp_tile_tokens else "not in tiles"),
    Column("in host memory", lambda of: ", ".join(_offloaded(of.config)) or "nothing"),
    Column("tokens, predicted", lambda of: of.config.seq_len, whole),
    Column("GiB of a host", lambda of: host_gib((), of.config) or None, "{:,.0f}".format),
    Column("as one rank: fit, do not", lambda of: ", ".join(whole(end.asked["seq_len"]) for end in of.ends) or None),
)


def longest_as_one_rank(cells: Sequence[Cell]) -> str:
    """A table of the searches of the sweep `one_rank_longest`; without a column of what none of them has found."""
    found = limits([cell for cell in cells if str(cell.rows[0]["folder"]).startswith("h200x1_one_rank_longest")])
    lines = []
    for search in sweep.read(overrides.read_arguments(["sweep=one_rank_longest"])).searches:
        ends = next((each.cells for each in found if search.probe_of(each.cells[0].rows[0])), ())
        lines.append(Longest(search.at(search.guess(None, None, None)), ends))
    return unpadded(LONGEST if found else LONGEST[:-1], lines)


def _method(config: TrialConfig) -> str:
    parts = words.METHODS[config.method.name], words.of_step("method.head_stride", config.method.head_stride)
    return ", ".join(filter(None, parts))


def _offloaded(config: TrialConfig) -> list[str]:
    optimizer = config.engine.optimizer_offload is not None
    return ["checkpoints"] * config.workload.checkpoint_offload + ["optimizer"] * optimizer


def one_rank_peaks(cells: Sequence[Cell]) -> Peaks:
    """How far the memory model is from steps of one real rank, of models with one kind of layer."""
    ones = [cell for cell in cells if not cell.all_ranks_were_there and cell.ok]
    return peaks([cell for cell in ones if not cell.asked["layer_kinds"]], "fsdp2")


def nccl_gib(_: Sequence[Cell]) -> str:
    """GiB of NCCL's on a rank of 2 or 4, from the least of a method to the most."""
    methods = ((1, False), (1, True), (2, False), (2, True), (4, False))  # ranks that exchange heads; a ring or none
    of_rank = [nccl.counts(degree, 8, sends=sends) for degree, sends in methods]
    found = [nccl.outside_bytes(each._replace(process=0)) / GIB for each in of_rank]
    return f"{min(found):.1f} to {max(found):.1f}"


def outside_gib(_: Sequence[Cell]) -> str:
    """GiB outside torch's allocator on a rank of a host of 8, from a gather's to an exchange's."""
    found = [nccl.outside_bytes(nccl.counts(degree, 8, sends=False)) / GIB for degree in (1, 8)]
    return f"{found[0]:.1f} to {found[1]:.1f}"


def policies(
    _: Sequence[Cell], of: projection.Fit, lengths: str, gpus: int
) -> dict[tuple[str, int | None], streams.Policy]:
    """(policy, GPUs of a document) -> what `project --lengths` prints for Qwen3-8B at 131,072 tokens a GPU."""
    cluster = candidates.Cluster(gpus, 8, 45.0, of.memory_gib or 0.0)
    config = _step_of(of, ["method=ulysses", "sp_size=2"])
    return {(each.policy, each.sp_size): each for each in streams.policies(of, config, cluster, lengths, ("full",))}


def policies_of_kernels(
    cells: Sequence[Cell], of: projection.Fit, lengths: str, what: str
) -> dict[tuple[str, int | None], streams.Policy]:
    """The same on 8 GPUs, by attention as it was measured as one rank of 8. what: attention, or step with all else by
    the fit."""
    found = streams.of_kernels(_kernels(cells), lengths, {"attention": 0.0, "step": _besides_ms(of)}[what])
    return {(each.policy, each.sp_size): each for each in found}


def padded_over_unpadded(cells: Sequence[Cell], of: projection.Fit, lengths: str) -> float:
    """How many times as long the kernels of 8 GPUs take if each document is padded to 131,072 tokens."""
    return streams.padded_over_unpadded(_kernels(cells), lengths, _besides_ms(of))


def _kernels(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.rows[0]["folder"] == KERNELS and cell.median_step_ms is not None]


def _besides_ms(of: projection.Fit) -> float:
    options = ["workload.activation_checkpointing=selective", "workload.model_code=compiled"]
    return streams.besides_ms(of, _step_of(of, ["method=single", "sp_size=1", *options]))


def _step_of(of: projection.Fit, options: Sequence[str]) -> TrialConfig:
    """A step of Qwen3-8B at 131,072 tokens."""
    words = [f"hardware={HARDWARE}", f"kernel={of.fastest_kernel}", f"fabric={of.fabric}", "model=qwen3_8b"]
    words += ["seq_len=131072", "workload=train_step", "workload.loss_tile_tokens=2048", "dtype=bfloat16", *options]
    ((config,), _settings) = sweep.configs(overrides.read_arguments(words))
    return config


# Tokens, and GB of the device, in the files of Arctic Long Sequence Training that docs/PROJECTION.md names.
PUBLISHED = {
    "optimizer in host memory, whole layers recomputed": (65_000, 137.36),
    "+ loss in tiles": (300_000, 134.96),
    "+ checkpoints in host memory": (650_000, 126.81),
    "+ MLP in tiles": (1_200_000, 136.15),
}
LADDER = ("h200x1_longest", "h200x1_longest_2", "h200x1_longest_3", "h200x2_longest_5", "h200x2_longest_7")


def published_ladder(cells: Sequence[Cell]) -> str:
    """A table: each rung as published, as the memory model has ours on one H200, and as searches found it."""
    searches = sweep.read(overrides.read_arguments(["sweep=h200x1_longest"])).searches
    found = limits([c for c in cells if c.rows[0]["folder"] in LADDER and c.asked["method"] in ("single", "ulysses")])
    measured: dict[int, str] = {}
    for edge in (each for each in found if each.largest_ok and each.smallest_oom):
        fits, beyond = (end.asked["seq_len"] for end in edge.cells)
        rung = next(n for n, each in enumerate(searches) if each.probe_of(edge.cells[0].rows[0]))
        measured[rung] = f"{fits:,}, {beyond:,}{' (host)' if edge.exhausted_memory else ''}"
    lines = [
        "| | published, tokens | device, GiB | ours at that length: tensors, GiB | ours, longest there "
        "| Qwen3-4B, one H200, host of 128 GiB: fits, does not "
        "| Llama-3-8B, two H200s with Ulysses, host of 256 GiB: fits, does not |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for n, (rung, (tokens, gb)) in enumerate(PUBLISHED.items()):
        ours = Search(replace(searches[n].config, model=searches[-1].config.model))
        longest = ours.guess(device_bytes("H200"), None, None)
        of_model = f"{gb * 1e9 / GIB:.0f} | {memory.peak(ours.at(tokens)).bytes / GIB:.0f} | {whole(longest)}"
        lines.append(f"| {rung} | {whole(tokens)} | {of_model} | {measured[n]} | {measured[n + 4]} |")
    return "\n".join(lines)


HELPERS = {
    each.__name__: each
    for each in (
        *(fit, num_longer, decision_map, longest_projected, host_gib, peaks),
        *(longest_as_one_rank, one_rank_peaks, nccl_gib, outside_gib),
        *(policies, policies_of_kernels, padded_over_unpadded, published_ladder),
    )
}
