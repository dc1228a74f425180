"""Which ranks compute which documents of a drawn batch, under each policy: what the planner makes of one batch."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.patches import Patch

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.config import streams
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import placing
from sp_bench.report.figures.panels import MOST_PANELS, PANEL_IN, grid, is_first, left_out, wrapped_title
from sp_bench.report.figures.style import BLACK, Look, Plot, legend, trial_ids

CAPTION = (
    "Which ranks compute which documents of the first batch. A box is a document, as wide as its predicted work on "
    "each of its ranks, and as dark as they are many. The batch ends with the longest bar."
)


def draw(cells: Sequence[Cell], look: Look) -> list[Plot]:
    """A panel for each policy, stream and model; the method, the dtype and all else change no plan."""
    found: dict[tuple[Any, ...], tuple[Cell, TrialConfig]] = {}
    for cell in cells:
        config = cell.asked["engine"] == "fsdp2" and cell.config  # Megatron plans for itself
        if config and config.workload.policy is not None:
            found.setdefault(_stream(config), (cell, config))
    if not found:
        return []
    shown = sorted(found.items(), key=lambda item: str(item[0]))[:MOST_PANELS]
    figure, axes = grid(look, len(shown), PANEL_IN)
    models = {words.model(cell) for _, (cell, _) in shown}
    handles: dict[str, Patch] = {}
    data, longest = [], 1.0
    for (_, (cell, config)), axis in zip(shown, axes, strict=True):
        plan, cost = placing.of_trial(config, next(streams.of_trial(config))), placing.by_work(config)
        boxes = [
            (rank, index, each.num_ranks, length, cost(length, each.num_ranks))
            for index, of_ranks in enumerate(plan)
            for rank, each in enumerate(of_ranks)
            if each is not None
            for length in each.documents
        ]
        mean, ends = sum(work for *_, work in boxes) / config.world_size, [0.0] * config.world_size
        for rank, index, size, length, work in boxes:
            shade = str(1 - 0.7 * size / config.world_size)
            axis.barh(rank, work / mean, left=ends[rank], color=shade, edgecolor=BLACK, lw=0.4, height=0.8)
            handles.setdefault(f"on {size} rank{'s' * (size > 1)}", Patch(fc=shade, ec=BLACK, lw=0.4))
            ends[rank] += work / mean
            data.append({"model": config.model.name, "policy": config.workload.policy,
                         "filling": config.workload.filling, "rank": rank, "pass": index, "tokens": length,
                         "group": size, "work": work / mean, "trial_ids": trial_ids(cell)})  # fmt: skip
        longest = max(longest, *ends)
        axis.axvline(1, color=BLACK, lw=0.8, ls=":")
        axis.set_yticks(range(config.world_size))
        axis.invert_yaxis()
        named = ", ".join(filter(None, [words.model(cell) if len(models) > 1 else "", words.policy(cell)]))
        axis.set_title(wrapped_title(f"{named}\nbusiest rank {max(ends):.2f}x the mean", look, len(axes)), loc="left")
        axis.set_xlabel("work of a rank, over the mean")
        if is_first(axis):
            axis.set_ylabel("rank")
    for axis in axes:
        axis.set_xlim(0, 1.05 * longest)
    legend(figure, dict(sorted(handles.items())), look)
    return [Plot("plans", "", figure, CAPTION + left_out(len(found) - MOST_PANELS), pd.DataFrame(data))]


def _stream(config: TrialConfig) -> tuple[Any, ...]:
    """What a plan depends on."""
    workload, model = config.workload, config.model
    ranks = config.world_size, config.sp_size, config.seq_len, config.seed
    drawn = workload.packing, workload.document_len, workload.document_sigma, workload.document_lens
    work = model.name, model.num_layers, model.num_heads, model.head_dim
    return workload.policy, workload.filling, *ranks, *drawn, *work
