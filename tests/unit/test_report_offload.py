"""What a ratio of tokens/s consists of: an exact product of the rows' own numbers, and what is missing said."""

from collections.abc import Sequence
from typing import Any

import pytest

from sp_bench.report.offload import Parts, breakdowns
from sp_bench.report.page.offload import HEAD, summary
from sp_bench.report.page.parts import Section, plain
from sp_bench.report.page.sections import sections

from .pages import page_of
from .rows import cells_of, hf_step

ADAM = "deepspeed_cpu_adam"
CAP = {"device_memory_gib": 80.0}
ONE_GPU, DATA_PARALLEL = {"sp_size": 1}, {"sp_size": 1, "dp_shard_size": 4}
LENGTHS = {8192: 300.0, 32768: 1200.0, 65536: 4000.0, 98304: 8000.0}  # ms without offload
OFFLOAD_MS = 1500.0  # whatever the length
OF_ONE_GPU = ("over the baseline", "x work a token", "utilization x offload")


def both(seq_len: int, ms: float, **asked: Any) -> list[dict[str, Any]]:
    plain = hf_step(seq_len=seq_len, median_ms=ms, **asked)
    return [plain, hf_step(seq_len=seq_len, median_ms=ms + OFFLOAD_MS, offload=ADAM, **asked)]


def campaign(**asked: Any) -> list[dict[str, Any]]:
    rows = [row for n, ms in LENGTHS.items() for row in both(n, ms, **asked)]
    return rows + both(8192, 900.0, **ONE_GPU, **asked) + both(8192, 1000.0, **DATA_PARALLEL, **asked)


def broken_down(rows: Sequence[dict[str, Any]]) -> list[tuple[Parts, ...]]:
    return breakdowns(cells_of(rows))


def section_of(rows: Sequence[dict[str, Any]]) -> Section:
    (section,) = (s for s in sections(cells_of(rows)) if s.anchor == "offload")
    return section


def columns(section: Section, table: int, name: str) -> list[str]:
    return [plain((line.texts[HEAD.index(name)],)) for line in section.tables[table].lines]


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


def test_without_offload_anywhere_or_without_anything_beside_it_there_is_no_section() -> None:
    rows = campaign()
    for kept in ([r for r in rows if r["optimizer_offload"]], [r for r in rows if not r["optimizer_offload"]], []):
        assert "offload" not in {section.anchor for section in sections(cells_of(kept))}


def test_the_sentence_is_on_the_longest_published_length_beside_what_was_published() -> None:
    points = [plain(words) for words in section_of(campaign()).points]
    (over_one,) = (words for words in points if "over 8,192 tokens on 1 GPU" in words)
    (over_four,) = (words for words in points if "over 4 x 8,192 tokens on 4 GPUs" in words)
    assert over_one.startswith(
        "deepspeed_ulysses_hf (deepspeed 0.19.8), 65,536 tokens on 4 GPUs over 8,192 tokens on 1 GPU"
    )
    ratio, without = (65536 / 5500) / (8192 / 2400), (65536 / 4000) / (8192 / 900)
    assert f"{ratio:.2f}x the tokens/s (by medians of 1 replicate, no interval)" in over_one
    assert "published 3.69x = 13,396 / 3,633 on 1 GPU, with 8 micro-batches a step" in over_one
    assert "4.00x by the number of devices" in over_one
    assert "makes the baseline's step 2.67x as long and this one's 1.38x" in over_one
    assert over_one.endswith(f"on both sides the ratio is {without:.2f}x.")
    assert "3,633 if DP=4" in over_four
    assert "1.00x by the number of devices" in over_four


def test_the_verdict_has_the_ratio_beside_the_published_one_alone() -> None:
    notes = [plain(words) for words in summary(cells_of(campaign()))]
    ratio = (65536 / 5500) / (8192 / 2400)
    assert len(notes) == 2
    assert (
        f"over 8,192 tokens on 1 GPU, hf_deepspeed, flash_attn, optimizer offloaded ({ADAM}): {ratio:.2f}x" in notes[0]
    )
    assert notes[0].endswith("published 3.69x = 13,396 / 3,633 on 1 GPU, with 8 micro-batches a step.")
    unpublished = [row for row in campaign() if row["seq_len"] in (8192, 98304)]
    unpublished = [row for row in unpublished if row["seq_len"] == 98304 or row["sp_size"] == 1]
    assert summary(cells_of(unpublished)) == []
    assert breakdowns(cells_of(unpublished)) != []


def test_a_cell_out_of_memory_leaves_its_factors_open_and_is_named() -> None:
    rows = [*campaign(), hf_step(seq_len=131072, offload=ADAM, status="oom", oom_site="torch")]
    rows = [row for row in rows if row["seq_len"] != 98304 or row["optimizer_offload"]]
    rows.append(hf_step(seq_len=98304, status="oom", oom_site="torch"))
    section = section_of(rows)
    assert columns(section, 0, "missing") == [
        *["nothing"] * 3,
        "98,304 tokens on 4 GPUs without offload: OOM",
        "131,072 tokens on 4 GPUs with offload: OOM; "
        "131,072 tokens on 4 GPUs without offload: not part of the campaign",
    ]
    assert columns(section, 0, "tokens/s")[-1] == "OOM"
    assert columns(section, 0, "over the baseline")[3] != "\N{EN DASH}"
    for name in ("x utilization", "x offload", "product", "without offload"):
        assert columns(section, 0, name)[3:] == ["\N{EN DASH}"] * 2


def test_without_the_plain_baseline_utilization_and_offload_stay_together() -> None:
    rows = [row for row in campaign(**CAP) if row["sp_size"] > 1 or row["optimizer_offload"]]
    rows += [
        hf_step(seq_len=8192, status="oom", oom_site="torch", **start, **CAP) for start in (ONE_GPU, DATA_PARALLEL)
    ]
    section = section_of(rows)
    words = next(plain(w) for w in section.points if "on 1 GPU" in plain(w))
    (at,) = (i for i, table in enumerate(section.tables) if "on 1 GPU (" in table.name)
    for ratio, work, together in zip(*(columns(section, at, name) for name in OF_ONE_GPU), strict=True):
        product = 4.0 * float(work.rstrip("x")) * float(together.rstrip("x"))
        assert product == pytest.approx(float(ratio.rstrip("x")), rel=0.03)  # each is rounded
    assert "capped at 80 GiB a device" in words
    assert words.endswith(
        "by utilization and offload, which cannot be told apart (8,192 tokens on 1 GPU without offload: OOM)."
    )


def test_without_a_baseline_that_ran_nothing_is_claimed() -> None:
    rows = [row for n, ms in LENGTHS.items() for row in both(n, ms)]
    rows += [hf_step(seq_len=8192, offload=o, status="oom", oom_site="torch", **ONE_GPU) for o in (None, ADAM)]
    section = section_of(rows)
    assert section.points == ()
    assert set(columns(section, 0, "utilization x offload")) == {"\N{EN DASH}"}
    assert set(columns(section, 0, "over the baseline")) == {"\N{EN DASH}"}


def test_the_page_links_every_factor_to_its_cells() -> None:
    page = page_of(campaign())
    assert "offload" in page.ids
    linked = [text for _, text in page.links]
    ratio = f"{(65536 / 5500) / (8192 / 2400):.2f}x"
    assert linked.count(ratio) >= 3  # in the sentence, as the ratio and as the product
    assert "4.00x" in linked
