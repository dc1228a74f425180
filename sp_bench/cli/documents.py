"""Helpers of templates that need more than a report may import: the fit of `project`, searches, and the memory model.

Each takes the cells of all campaigns first, which `templates.Rows` gives it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sp_bench.analysis.cells import Cell
from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory
from sp_bench.driver import overrides, sweep
from sp_bench.formats import GIB, whole
from sp_bench.predict import advice, projection, streams

HARDWARE = "h200"


def fit(cells: Sequence[Cell]) -> projection.Fit:
    """What `project` and `advise` rest on."""
    return projection.fit(cells, HARDWARE)


def num_longer(_: Sequence[Cell], of: projection.Fit) -> int:
    """Training steps that are longer than the one of their options from which they were predicted."""
    several = [steps for steps in of.steps.values() if projection.has_several_lengths(steps)]
    return sum(step.seq_len > min(each.seq_len for each in steps) for steps in several for step in steps)


def decision_map(_: Sequence[Cell], of: projection.Fit) -> str:
    """The table of `project --map --kernel cudnn`."""
    return advice.decision_map(of, "cudnn", 8)


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
    """What all ranks of a step hold in host memory, by the memory model."""
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
    """The errors of all rows on GPUs. but: campaign and kernel of rows that are left out."""
    found = []
    for cell in (each for each in cells if each.asked["workload"] == "train_step" and each.asked["engine"] == engine):
        for row in (each for each in cell.rows if each["status"] == "ok"):
            config, measured = parse(TrialConfig, json.loads(row["config"])), row["max_peak_allocated_bytes"]
            if measured and (row["folder"], config.kernel.name) != but:
                error = abs(memory.peak_of_row(config, row).bytes / measured - 1)
                found.append((error, config.world_size, config.seq_len // config.sp_size))
    return Peaks(*map(sorted, zip(*found, strict=True)))


def policies(
    _: Sequence[Cell], of: projection.Fit, lengths: str, gpus: int
) -> dict[tuple[str, int | None], streams.Policy]:
    """(policy, GPUs of a document) -> what `project --lengths` prints for Qwen3-8B at 131,072 tokens a GPU."""
    words = [f"hardware={HARDWARE}", f"kernel={of.fastest_kernel}", f"fabric={of.fabric}", "model=qwen3_8b"]
    words += ["seq_len=131072", "workload=train_step", "workload.loss_tile_tokens=2048"]
    words += ["method=ulysses", "sp_size=2", "dtype=bfloat16"]
    ((config,), _settings) = sweep.configs(overrides.read_arguments(words))
    cluster = advice.Cluster(gpus, 8, 45.0, of.memory_gib or 0.0)
    return {(each.policy, each.sp_size): each for each in streams.policies(of, config, cluster, lengths, ("full",))}


HELPERS = {
    each.__name__: each for each in (fit, num_longer, decision_map, longest_projected, host_gib, peaks, policies)
}
