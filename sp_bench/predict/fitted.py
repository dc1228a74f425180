"""What committed rows say, as a file of the package: the fit of each device, and steps of one real rank.

With it `advise` and `project` need no rows, and answer in a second. Written anew from a checkout, for a release, beside
what is outside torch's allocator (costs/nccl.json):

    python -m sp_bench.predict.fitted results/*
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sp_bench.analysis.cells import Cell, of_equal_steps
from sp_bench.analysis.cells import cells as cells_of
from sp_bench.analysis.held import errors, held
from sp_bench.analysis.metrics import memory_gib
from sp_bench.analysis.over_depth import OverDepth, over_depth
from sp_bench.analysis.selection import select
from sp_bench.config.conf_files import num_layers
from sp_bench.config.machine import NO_DELAY, LinkConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import nccl
from sp_bench.costs.device_rates import DeviceRates
from sp_bench.costs.links import message_time
from sp_bench.formats import GIB
from sp_bench.predict import outside
from sp_bench.predict.projection import Basis, Error, Fit, Rates, StepOptions, fit, step_options
from sp_bench.rows import git

FILE = "fitted.json"
HARDWARE = ("h200",)  # the devices with enough committed rows


@dataclass(frozen=True)
class OneRankStep:
    """A training step of one real rank of P, whole or by the line over layers."""

    model: str
    hardware: str
    method: str
    ulysses_degree: int
    ring_degree: int
    world_size: int
    num_nodes: int
    seq_len: int
    options: StepOptions
    link: str
    network_gib_per_s: float | None  # of one GPU to other nodes, by its link; None: one node
    step_ms: float
    peak_gib: float
    layers: tuple[int, int] | None  # whose line gives the step; None: it ran whole
    campaigns: tuple[str, ...]

    @property
    def num_cells(self) -> int:
        return 2 if self.layers else 1


@dataclass(frozen=True)
class Fitted:
    commit: str  # of the checkout in which it was written
    num_cells: int
    fits: dict[str, Fit]  # by hardware
    one_rank: tuple[OneRankStep, ...]
    one_rank_errors: tuple[float, ...]  # relative, of steps that rows of all ranks check; negative: too short


def of_cells(cells: Sequence[Cell], commit: str, hardware: Sequence[str]) -> Fitted:
    """What answers about some devices rest on.

    Raises:
        NotProjectable: there are too few rows of one of them.
    """
    fits = {name: fit(cells, name) for name in hardware}
    return Fitted(commit, len(cells), fits, one_rank_steps(cells), errors(held(cells), "train_step"))


def one_rank_steps(cells: Sequence[Cell]) -> tuple[OneRankStep, ...]:
    """Whole steps of one real rank with modelled messages; those that only ran with few layers, by their line."""
    wholes = [c for c in cells if _is_step(c) and c.asked["num_layers"] == num_layers(c.asked["model"])]
    lines = [line for line in over_depth(cells) if line.whole is None and _is_step(line.few)]
    steps = [_step(cell, None) for cell in wholes] + [_step(line.few, line) for line in lines]
    return tuple(sorted((step for step in steps if step is not None), key=lambda step: repr(asdict(step))))


def load() -> Fitted:
    """The file of the package."""
    return from_json(json.loads(files("sp_bench.predict").joinpath(FILE).read_text("utf-8")))


def rates_of(config: TrialConfig) -> DeviceRates:
    """What one device of the trial's kind reaches, by committed rows. Nothing without rows of its hardware, fabric and
    dtype."""
    fitted = load()
    fit = fitted.fits.get(config.hardware.name)
    inside_hosts = {fit.fabric, "network"} if fit else ()  # which has NVLink inside a host too
    if fit is None or config.dtype != "bfloat16" or config.fabric.name not in inside_hosts:
        return DeviceRates()
    attention_ms = fit.rates.attention.get(f"flops {config.kernel.name}")
    return DeviceRates(
        products_flops_per_s=1e3 / fit.rates.step["matrix products"],
        attention_flops_per_s=attention_ms and 1e3 / attention_ms,
        pair_bytes_per_s=fit.inside["send_recv"],
        all_bytes_per_s=fit.inside["all_to_all"],
        source=f"expected: what committed rows of {config.hardware.name} reach ({fitted.commit})",
    )


def to_json(fitted: Fitted) -> dict[str, Any]:
    fits = {name: {**asdict(each), "steps": [], "peak_errors": []} for name, each in fitted.fits.items()}
    for name, each in fitted.fits.items():  # keys of JSON are texts, and options are several values
        fits[name]["steps"] = [[options, cells] for options, cells in each.steps.items()]
        fits[name]["peak_errors"] = [[options, errors] for options, errors in each.peak_errors.items()]
    return {**asdict(fitted), "fits": fits}


def from_json(given: dict[str, Any]) -> Fitted:
    fits = {}
    for name, each in given["fits"].items():
        made = {
            "rates": Rates(**each["rates"]),
            "attention": tuple(map(_basis, each["attention"])),
            "steps": {tuple(options): tuple(map(_basis, cells)) for options, cells in each["steps"]},
            "peak_errors": {tuple(options): tuple(errors) for options, errors in each["peak_errors"]},
            "errors": tuple(Error(e["what"], tuple(e["errors"]), e["worst"]) for e in each["errors"]),
        }
        fits[name] = Fit(**{**each, **made})
    one_rank = tuple(
        OneRankStep(
            **{
                **step,
                "options": tuple(step["options"]),
                "layers": tuple(step["layers"]) if step["layers"] else None,
                "campaigns": tuple(step["campaigns"]),
            }
        )
        for step in given["one_rank"]
    )
    return Fitted(given["commit"], given["num_cells"], fits, one_rank, tuple(given["one_rank_errors"]))


def _basis(given: Sequence[Any]) -> Basis:
    kernel, seq_len, sp_size, campaigns = given
    return Basis(kernel, seq_len, sp_size, tuple(campaigns))


def _is_step(cell: Cell) -> bool:
    delayed = cell.link not in ("", NO_DELAY)
    return cell.ok and delayed and cell.is_comparable and cell.asked["workload"] == "train_step"


def _step(cell: Cell, line: OverDepth | None) -> OneRankStep | None:
    """None without a peak, of several sequences, of another engine, with products in FP8, or with options that this
    version lacks."""
    peak = line.peak_gib if line else memory_gib(cell)
    step_ms = line.step_ms if line else cell.median_step_ms
    if (config := cell.config) is None or peak is None or step_ms is None:
        return None
    if config.world_size != config.sp_size or config.num_sequences != 1:
        return None
    if (config.engine.name, config.workload.linear_dtype) != ("fsdp2", "model"):
        return None
    ring = cell.asked["ring_degree"] or 1
    return OneRankStep(
        model=config.model.name,
        hardware=config.hardware.name,
        method=config.method.name,
        ulysses_degree=config.sp_size // ring,
        ring_degree=ring,
        world_size=config.world_size,
        num_nodes=config.num_nodes,
        seq_len=config.seq_len,
        options=step_options(config),
        link=config.link.name,
        network_gib_per_s=network_gib_per_s(config.link) if config.num_nodes > 1 else None,
        step_ms=step_ms,
        peak_gib=peak,
        layers=line.num_layers_run if line else None,
        campaigns=tuple(sorted({str(row["folder"]) for row in cell.measured})),
    )


def network_gib_per_s(link: LinkConfig) -> float | None:
    """What a card carries of a message of a GiB to another host, between as many hosts as it is fastest; None of one
    host."""
    hosts = [int(curve.split()[1]) for curve in link.between]
    return max((1 / message_time(link, "send", GIB, range(n), per_node=1).far_s for n in hosts), default=None)


def main(folders: Sequence[str]) -> None:
    held = outside.fitted([Path(folder) for folder in folders])
    Path(str(files("sp_bench.costs").joinpath(nccl.FILE))).write_text(f"{json.dumps(held._asdict())}\n", "utf-8")
    read = cells_of(of_equal_steps(select([Path(folder) for folder in folders]).rows))
    cells = [cell for cell in read if cell.processor == "GPU"]
    sha, _ = git.state()
    text = json.dumps(
        to_json(of_cells(cells, git.short(sha or "unknown"), HARDWARE)), separators=(",", ":"), allow_nan=False
    )
    Path(str(files("sp_bench.predict").joinpath(FILE))).write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
