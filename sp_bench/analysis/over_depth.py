"""Whole training steps from steps of few layers: time and memory are lines over the number of layers.

One real rank of a step that takes minutes is run with 2 and 4 layers, say. Their rows say so (`num_layers`), and the
line through both gives the step of all layers. Where the whole step was run too, it checks the line. Where layers are
of several kinds, their pattern must be whole in both; a model that ends within it is off by a part of one layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sp_bench.analysis.cells import Cell, cells
from sp_bench.analysis.metrics import memory_gib
from sp_bench.analysis.words import LAYERS_RUN
from sp_bench.config.conf_files import num_layers
from sp_bench.config.options import BY_COLUMN

_LINEAR = ("median_step_ms", "max_peak_allocated_bytes", "comm_predicted_bytes", "comm_counted_bytes")
_KEPT = {  # what a row of a line has of the row with more layers
    *BY_COLUMN,
    *("status", "cell_id", "trial_id", "env_id", "core_id", "replicate", "attempt", "started_at", "evidence"),
    *("implementation", "engine_implementation", "method_source", "primitive", "world_size", "config", "environment"),
    *("flags", "folder", "file", "pool", "device_set", "probe", "git_sha", "schema_version"),
}


@dataclass(frozen=True)
class OverDepth:
    """Two cells that differ in their layers, and the depth of their model."""

    few: Cell
    more: Cell
    num_layers: int
    whole: Cell | None  # the cell of that depth

    @property
    def step_ms(self) -> float:
        assert self.few.median_step_ms is not None
        assert self.more.median_step_ms is not None
        return self._at_depth(self.few.median_step_ms, self.more.median_step_ms)

    @property
    def peak_gib(self) -> float | None:
        few, more = memory_gib(self.few), memory_gib(self.more)
        return None if few is None or more is None else self._at_depth(few, more)

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        tokens = self.few.tokens_per_step
        return None if tokens is None else 1e3 * tokens / self.step_ms / self.few.asked["world_size"]

    @property
    def check(self) -> tuple[float, float] | None:
        """Time and peak by the line, over those of the whole step."""
        peak = self.whole and memory_gib(self.whole)
        if self.whole is None or not self.whole.median_step_ms or not peak or self.peak_gib is None:
            return None
        return self.step_ms / self.whole.median_step_ms, self.peak_gib / peak

    @property
    def num_layers_run(self) -> tuple[int, int]:
        return self.few.asked["num_layers"], self.more.asked["num_layers"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each replicate of both depths, as the whole step would have: what was asked, and what the line
        says. All else that was measured is unknown."""
        made = []
        for key in self.few.launches.keys() & self.more.launches.keys():
            few, more = self.few.launches[key], self.more.launches[key]
            of_line = {name: self._of_rows(few, more, name) for name in _LINEAR}
            tokens = more["tokens_per_s"] * more["median_step_ms"] / of_line["median_step_ms"]
            made.append(
                {name: more[name] if name in _KEPT else None for name in more}
                | {**of_line, "num_layers": self.num_layers, "tokens_per_s": tokens, LAYERS_RUN: self.num_layers_run}
            )
        return made

    def _of_rows(self, few: Mapping[str, Any], more: Mapping[str, Any], name: str) -> float | None:
        return None if few[name] is None or more[name] is None else self._at_depth(few[name], more[name])

    def _at_depth(self, few: float, more: float) -> float:
        first, second = self.num_layers_run
        return few + (self.num_layers - first) * (more - few) / (second - first)


def over_depth(cells: Sequence[Cell]) -> list[OverDepth]:
    """The steps of one real rank that ran with two depths below that of their model: the two smallest, if more ran."""
    grouped: dict[tuple[Any, ...], dict[int, Cell]] = {}
    for cell in cells:
        is_one_rank = not cell.all_ranks_were_there and cell.is_comparable
        if cell.ok and is_one_rank and cell.asked["workload"] == "train_step" and cell.asked["num_layers"]:
            place = (cell.pool, cell.link, *cell.but("model.num_layers"))
            grouped.setdefault(place, {})[cell.asked["num_layers"]] = cell
    found = []
    for by_depth in grouped.values():
        asked = next(iter(by_depth.values())).asked
        depth, period = num_layers(asked["model"]), len((asked["layer_kinds"] or "full").split("+"))
        few = sorted(number for number in by_depth if depth is not None and number < depth and number % period == 0)
        if depth is not None and len(few) > 1:
            found.append(OverDepth(by_depth[few[0]], by_depth[few[1]], depth, by_depth.get(depth)))
    return sorted(found, key=_order)


def at_full_depth(found: Sequence[Cell]) -> list[Cell]:
    """The cells, with one of all layers in the place of those that ran with few: by their line, unless it ran."""
    lines = over_depth(found)
    of_line = {cell.cell_id for line in lines for cell in (line.few, line.more)}
    rows = [row for line in lines if line.whole is None for row in line.rows]
    return [
        *(cell for cell in found if cell.cell_id not in of_line),
        *(cells(pd.DataFrame(rows, dtype=object)) if rows else ()),
    ]


def _order(of: OverDepth) -> tuple[Any, ...]:
    asked = of.few.asked
    return asked["model"], asked["sp_size"], asked["seq_len"], of.few.link, asked["method"], of.few.cell_id
