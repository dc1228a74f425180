"""Where a training step's time goes: its kernels by class, messages that nothing hides, and waiting."""

from collections.abc import Sequence
from statistics import mean, median

import pandas as pd
from matplotlib.patches import Patch

from sp_bench.report import words
from sp_bench.report.cells import Cell, listed
from sp_bench.report.figures.panels import ROW_IN
from sp_bench.report.figures.style import Look, Plot, trial_ids, wrapped
from sp_bench.report.ratios import by_speed
from sp_bench.report.settings import Setting

# Paul Tol's bright scheme and greys, 2021
SHOWN = {
    "attention": ("attention", "#4477AA"),
    "matmul": ("matrix products", "#66CCEE"),
    "other": ("other kernels", "#CCBB44"),
    "exposed_messages": ("messages that nothing hides", "#EE6677"),
    "idle": ("nothing runs", "#DDDDDD"),
}
MOST_BARS = 24  # of one figure: the longest sequences go first


def draw(settings: Sequence[Setting], look: Look) -> list[Plot]:
    found = [(setting, cell) for setting in settings for cell in setting.cells if _is_step(cell) and shares(cell)]
    found.sort(key=lambda each: (-(each[1].asked["seq_len"] or 0), by_speed(each[1])))
    found = found[:MOST_BARS]
    if not found:
        return []
    shown = list({setting.title: setting for setting, _ in found}.values())
    width = 60 if look.width_in > 5 else 28
    names = [wrapped(_name(setting, cell, shown), width) for setting, cell in reversed(found)]
    tallest = max(name.count("\n") for name in names)
    figure = look.figure((ROW_IN + 0.03 + 0.1 * tallest) * len(found) + 0.95)
    axis = figure.subplots()
    data = []
    for place, (_, cell) in enumerate(reversed(found)):
        left, parts = 0.0, {part: share for part, share in shares(cell).items() if part in SHOWN}
        for part, share in parts.items():
            axis.barh(place, share, left=left, color=SHOWN[part][1], height=0.7, lw=0)
            left += share
        limit = share_of_limit(cell)
        if limit is not None:
            axis.plot([limit, limit], [place - 0.42, place + 0.42], color="#000000", lw=1.2)
        data.append({"method": words.method(cell), "seq_len": cell.asked["seq_len"], "step_ms": cell.median_step_ms,
                     **parts, "share_of_limit": limit, "trial_ids": trial_ids(cell)})  # fmt: skip
    axis.set_yticks(range(len(found)), names, fontsize=6.5)
    axis.set_ylim(-0.7, len(found) - 0.3)
    axis.set_xlim(0, 1)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("share of the step")
    handles = [Patch(color=colour, label=label) for label, colour in SHOWN.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3 if look.width_in > 5 else 1)
    shared = [part for part in shown[0].parts if all(part in setting.parts for setting in shown)]
    caption = (
        f"{', '.join(shared)}. Shares of one untimed step, by the kernels that ran. The black line is the limit: "
        "attention and matrix products alone, nothing twice, over the timed step."
    )
    return [Plot("steps", "", figure, caption, pd.DataFrame(data))]


def _is_step(cell: Cell) -> bool:
    return cell.ok and cell.asked["workload"] == "train_step"


def shares(cell: Cell) -> dict[str, float]:
    """Of the untimed step, by class of kernels: mean over ranks, median over replicates. Empty: not known."""
    per_row = [_of_row(listed(row["kernel_ms"])) for row in cell.measured if listed(row["kernel_ms"])]
    return {part: median(each[part] for each in per_row) for part in SHOWN} if per_row else {}


def _of_row(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    total = mean(sum(rank[part] for part in SHOWN) for rank in ranks)
    return {part: mean(rank[part] for rank in ranks) / total for part in SHOWN}


def share_of_limit(cell: Cell) -> float | None:
    return cell.middle("share_of_limit")


def _name(setting: Setting, cell: Cell, shown: Sequence[Setting]) -> str:
    parts = [words.method(cell), words.place(cell), setting.apart(shown)]
    return ", ".join(filter(None, parts))
