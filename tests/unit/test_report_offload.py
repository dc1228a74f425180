"""What a ratio of tokens/s consists of: an exact product of the rows' own numbers, and what is missing said."""

from collections.abc import Sequence
from typing import Any

import pytest

from sp_bench.report.offload import Parts, breakdowns
from sp_bench.report.published import beside

from .rows import cells_of, hf_step

ADAM = "deepspeed_cpu_adam"
CAP = {"device_memory_gib": 80.0}
ONE_GPU, DATA_PARALLEL = {"sp_size": 1}, {"sp_size": 1, "dp_shard_size": 4}
LENGTHS = {8192: 300.0, 32768: 1200.0, 65536: 4000.0, 98304: 8000.0}  # ms without offload
OFFLOAD_MS = 1500.0  # whatever the length


def both(seq_len: int, ms: float, **asked: Any) -> list[dict[str, Any]]:
    plain = hf_step(seq_len=seq_len, median_ms=ms, **asked)
    return [plain, hf_step(seq_len=seq_len, median_ms=ms + OFFLOAD_MS, offload=ADAM, **asked)]


def campaign(**asked: Any) -> list[dict[str, Any]]:
    rows = [row for n, ms in LENGTHS.items() for row in both(n, ms, **asked)]
    return rows + both(8192, 900.0, **ONE_GPU, **asked) + both(8192, 1000.0, **DATA_PARALLEL, **asked)


def broken_down(rows: Sequence[dict[str, Any]]) -> list[tuple[Parts, ...]]:
    return breakdowns(cells_of(rows))


def test_the_four_factors_multiply_to_the_measured_ratio_at_every_length_and_baseline() -> None:
    found = broken_down(campaign())
    assert len(found) == 2
    assert {parts[0].devices for parts in found} == {4.0, 1.0}
    for parts in found:
        assert [p.long.offloaded.asked["seq_len"] for p in parts] == [*LENGTHS]
        for part in parts:
            assert part.ratio is not None
            assert part.product == pytest.approx(part.ratio, rel=1e-9)


def test_each_factor_is_what_its_name_says() -> None:
    (parts,) = (parts for parts in broken_down(campaign()) if parts[0].devices == 4)
    part = parts[2]
    assert part.ratio == pytest.approx((65536 / 5500) / (8192 / 2400))
    assert part.plain_ratio == pytest.approx((65536 / 4000) / (8192 / 900))
    assert part.offload == pytest.approx((2400 / 900) / (5500 / 4000))
    assert part.plain_ratio * part.offload == pytest.approx(part.ratio)
    plain_cells = part.long.plain, part.start.plain
    assert all(cell and cell.mfu for cell in plain_cells)
    mfus = [cell.mfu or 0.0 for cell in plain_cells if cell]
    assert part.utilization == pytest.approx(mfus[0] / mfus[1])
    assert part.work is not None
    assert part.work < 1  # tokens of longer sequences are dearer


def test_a_cap_an_engine_a_kernel_or_another_checkpointing_is_never_the_other_half_of_a_pair() -> None:
    uncapped, capped = campaign(), campaign(**CAP)
    assert len(broken_down([*uncapped, *capped])) == 4
    for other in (CAP, {"engine": "hf_trainer"}, {"kernel": "cudnn"}, {"fabric": "shm"}):
        rows = [row for row in uncapped if row["optimizer_offload"]]
        rows += [hf_step(seq_len=n, **other) for n in LENGTHS] + [hf_step(seq_len=8192, **ONE_GPU, **other)]
        assert broken_down(rows) == []


def test_without_offload_anywhere_or_without_anything_beside_it_there_is_nothing_to_break_down() -> None:
    rows = campaign()
    for kept in ([r for r in rows if r["optimizer_offload"]], [r for r in rows if not r["optimizer_offload"]], []):
        assert broken_down(kept) == []


def test_a_cell_out_of_memory_leaves_its_factors_open() -> None:
    rows = [row for row in campaign() if row["seq_len"] != 98304 or row["optimizer_offload"]]
    rows.append(hf_step(seq_len=98304, status="oom", oom_site="torch"))
    part = next(parts for parts in broken_down(rows) if parts[0].devices == 4)[-1]
    assert part.ratio is not None
    assert (part.utilization, part.offload, part.product) == (None, None, None)


def test_what_others_published_stands_beside_the_cell_of_the_closest_stack_with_what_differs() -> None:
    rows = [*campaign(), hf_step(seq_len=65536, median_ms=3000.0, engine="fsdp2", micro_batches=8)]
    lines = [line for line in beside(cells_of(rows))[3] if line[1] == "tokens/s by ulysses, 65,536 tokens"]
    line, on_the_device = lines
    assert on_the_device[3] == f"{65536 / 4:,.0f}"
    assert "offload" in on_the_device[6]
    assert line[2:4] == ("13,396", f"{65536 / 5.5:,.0f}")
    assert "hf_deepspeed, optimizer offloaded" in line[5]
    assert "micro-batches" in line[6]
