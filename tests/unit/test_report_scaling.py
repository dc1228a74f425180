"""Steps over P ranks net of the same stack's on one."""

import csv
import io
from typing import Any

import pytest

from sp_bench.analysis.scaling import Scalings, scalings
from sp_bench.analysis.settings import settings
from sp_bench.report.findings import findings
from sp_bench.report.setting_tables import VALUES, tables
from sp_bench.report.setting_tables import lines as lines_of
from sp_bench.report.table import as_csv

from .rows import cells_of, hf_step

THEIRS: dict[str, Any] = {"engine": "hf_deepspeed"}
OURS: dict[str, Any] = {"engine": "fsdp2", "implementation": "sp_bench", "method": "ulysses"}
TOKENS: dict[str, Any] = {"seq_len": 32768}
ON_ONE: dict[str, Any] = {"sp_size": 1, "method": "single", "implementation": "sp_bench"}


def steps(replicates: int = 1, **ms: tuple[float, float]) -> list[dict[str, Any]]:
    """Of each stack its step on one GPU and on 4, of 32,768 tokens; replicates lie up to 1% apart, all together."""
    made = []
    for stack, times in ms.items():
        for size, median_ms in zip((1, 4), times, strict=True):
            columns: dict[str, Any] = {"theirs": THEIRS, "ours": OURS}[stack] | (
                ON_ONE if size == 1 else {"sp_size": 4}
            )
            for r in range(replicates):
                of_block = median_ms * (1 + 0.002 * r)
                made.append(hf_step(seq_len=32768, median_ms=of_block, replicate=r, **columns))
    return made


def found(rows: list[dict[str, Any]]) -> list[Scalings]:
    return scalings(settings(cells_of(rows)))


def test_a_stack_that_is_slow_on_one_gpu_is_compared_net_of_that():
    """Theirs takes twice as long on 4 GPUs, and 1.6 times on one: 1.25 times is what it loses by the ranks."""
    (place,) = found(steps(replicates=6, theirs=(3200.0, 1000.0), ours=(2000.0, 500.0)))
    assert [line.efficiency for line in place.lines] == pytest.approx([1.0, 0.8])
    ours, theirs = place.lines
    assert [line.cell.options["engine.name"] for line in place.lines] == ["fsdp2", "hf_deepspeed"]
    net_ratio = place.net_ratio(theirs)
    net, paired = net_ratio.ratio, net_ratio.paired
    assert net == pytest.approx(1.25)
    assert paired is not None  # what slows a whole block cancels
    assert (paired.interval.low, paired.interval.high) == pytest.approx((1.25, 1.25))
    assert ours.interval is not None
    assert (ours.interval.low, ours.interval.high) == pytest.approx((1.0, 1.0))
    assert place.net_ratio(ours).ratio == 1


def test_fewer_than_six_replicates_have_a_ratio_and_no_interval():
    (place,) = found(steps(replicates=5, theirs=(3200.0, 1000.0), ours=(2000.0, 500.0)))
    assert all(line.interval is None for line in place.lines)
    net_ratio = place.net_ratio(place.lines[1])
    net, paired = net_ratio.ratio, net_ratio.paired
    assert (net, paired) == (pytest.approx(1.25), None)


@pytest.mark.parametrize(
    "other",
    [
        {"seq_len": 8192},  # its tokens cost less attention
        {"kernel": "cudnn"},
        {"offload": "deepspeed_cpu_adam"},
        {"model": "llama3_8b"},
        {"micro_batches": 2},
        {"status": "oom", "oom_site": "torch"},
    ],
)
def test_a_baseline_has_the_same_sequence_kernel_and_options(other: dict[str, Any]):
    over_ranks = [row for row in steps(theirs=(3200.0, 1000.0)) if row["sp_size"] == 4]
    assert found([*over_ranks, hf_step(**(TOKENS | ON_ONE | other))]) == []
    assert len(found([*over_ranks, hf_step(**(TOKENS | ON_ONE))])) == 1


def test_data_parallelism_over_as_many_gpus_is_a_nearer_baseline_than_one_gpu():
    rows = steps(theirs=(3200.0, 1000.0))
    beside = [hf_step(**(TOKENS | ON_ONE), dp_shard_size=size, median_ms=ms) for size, ms in ((4, 2000.0), (8, 1.0))]
    ((line,),) = [place.lines for place in found([*rows, *beside])]
    assert (line.alone.asked["dp_shard_size"], line.efficiency) == (4, pytest.approx(0.5))
    assert found([*rows[1:], beside[1]]) == []  # neither one GPU nor as many


def test_table_findings_and_csv_have_it():
    cells = cells_of(steps(replicates=6, theirs=(3200.0, 1000.0), ours=(2000.0, 500.0)))
    made = settings(cells)
    (table,) = [each for each in tables(made) if "net of the stack" in each.title]
    assert [line.name.rpartition(", ")[2] for line in table.groups[0].lines] == ["fsdp2", "hf_deepspeed"]
    assert [table.texts(line)[-2:] for line in table.groups[0].lines] == [
        ("1.000 [1.000, 1.000]", ""),
        ("0.800 [0.800, 0.800]", "1.25x [1.25, 1.25]"),
    ]
    text = io.StringIO(as_csv(VALUES, lines_of(tables(made))))
    lines = [line for line in csv.DictReader(text) if line["scaling_efficiency"]]
    assert [float(line["scaling_efficiency"]) for line in lines] == pytest.approx([1.0, 0.8])
    assert [float(line["baseline_step_ms"]) for line in lines] == pytest.approx([2010.0, 3216.0])
    assert float(lines[1]["net_ratio_to_first"]) == pytest.approx(1.25)
    assert "## Stacks net of their baseline" in findings(made, cells)
    assert "0.800 [0.800, 0.800] | 1.25x [1.25, 1.25] |" in findings(made, cells)
