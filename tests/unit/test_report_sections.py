"""The page's sections beside verdict, figures and tables: words and numbers, made of rows in memory."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sp_bench.report import fabric_model
from sp_bench.report.fabric_model import Place, places
from sp_bench.report.figures import draw
from sp_bench.report.figures.drawings import Drawing
from sp_bench.report.figures.fabrics import by_figure
from sp_bench.report.gradient_errors import compared, options
from sp_bench.report.page import fabrics
from sp_bench.report.page.attribution import HEAD as ATTRIBUTION_HEAD
from sp_bench.report.page.parts import Line, Ref, Section, plain
from sp_bench.report.page.sections import sections
from sp_bench.report.time_parts import Part, attributions

from .pages import page_of
from .rows import ENVIRONMENT, cells_of, collective, row

MIB, GIB = 2**20, 2**30
ULYSSES = {"method": "ulysses", "sp_size": 8, "ulysses_degree": 8, "ring_degree": 1}
RING = {"method": "ring", "layout": "zigzag", "sp_size": 8, "ring_degree": 8, "dkv_dtype": "input"}
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "seq_len": 131072}


def sections_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Section]:
    return {section.anchor: section for section in sections(cells_of(rows))}


def texts(line: Line) -> tuple[str, ...]:
    """A table's line without its links."""
    return tuple(plain((text,)) for text in line.texts)


def config(**method: Any) -> str:
    return json.dumps({"hardware": {"name": "cpu", "device": "cpu"}, "method": method})


def on_fabrics(times: Mapping[str, tuple[float, float]], replicates: int = 1, **ring: Any) -> list[dict[str, Any]]:
    """fabric -> (Ulysses' ms, the ring's ms); 5 Ulysses bytes travel for 12 of the ring's at these heads."""
    return [
        row(median_ms=ms, fabric=fabric, replicate=r, **HEADS, **method)
        for fabric, both in times.items()
        for ms, method in zip(both, (ULYSSES, RING | ring), strict=True)
        for r in range(replicates)
    ]


def bandwidths(fast: tuple[float, float], slow: tuple[float, float]) -> list[dict[str, Any]]:
    """(all-to-all, p2p) GiB/s of nvlink and shm."""
    return [
        collective(fabric, primitive, value)
        for fabric, both in (("nvlink", fast), ("shm", slow))
        for primitive, value in zip(("all_to_all", "send_recv"), both, strict=True)
    ]


def place_of(rows: Sequence[Mapping[str, Any]]) -> Place:
    (place,) = places(cells_of(rows))
    return place


# fabrics


def test_fabrics_need_two_fabrics_with_bandwidths() -> None:
    rows = on_fabrics({"nvlink": (100.0, 110.0), "shm": (130.0, 120.0)})
    assert "fabrics" not in sections_of(rows)
    one = [r for r in bandwidths((300, 300), (20, 20)) if r["fabric"] == "nvlink"]
    assert "fabrics" not in sections_of(rows + one)
    assert "fabrics" in sections_of(rows + bandwidths((300, 300), (20, 20)))


def test_the_bandwidth_of_a_primitive_is_the_median_over_its_rows() -> None:
    rows = [collective("nvlink", "all_to_all", value, replicate=r) for r, value in enumerate((60, 10, 20))]
    (bandwidth,) = fabric_model.bandwidths(cells_of(rows)).values()
    assert bandwidth.bytes_per_s == pytest.approx(20 * GIB)


def test_byte_times_are_predicted_bytes_over_the_bandwidth_of_the_own_primitive() -> None:
    rows = on_fabrics({"nvlink": (100.0, 110.0), "shm": (130.0, 120.0)}) + bandwidths((300, 320), (10, 20))
    points = {(p.cell.asked["method"], p.fabric): p for p in place_of(rows).points}
    assert points["ulysses", "shm"].communication_ms == pytest.approx(1e3 * 560 * MIB / (10 * GIB))
    assert points["ring", "shm"].communication_ms == pytest.approx(1e3 * 1344 * MIB / (20 * GIB))


def test_a_hybrids_bytes_are_divided_by_the_bandwidth_of_each_of_its_primitives() -> None:
    usp = {"method": "usp", "layout": "zigzag", "sp_size": 8, "ulysses_degree": 2, "ring_degree": 4}
    rows = [row(fabric=f, **HEADS, **m) for f in ("nvlink", "shm") for m in (usp, ULYSSES)]
    points = place_of(rows + bandwidths((300, 330), (10, 20))).points
    point = next(p for p in points if p.cell.asked["method"] == "usp" and p.fabric == "shm")
    assert point.primitive == "all_to_all"  # the slower of the two is its place on the axis
    for entry in point.cell.rows[0]["comm"]:
        bandwidth = {"all_to_all": 10, "send": 20}[entry["op"]] * GIB
        key = (entry["phase"], entry["op"])
        assert point.times[key] == pytest.approx(1e3 * entry["predicted_bytes"] / bandwidth)


def test_copy_engines_are_divided_by_their_own_bandwidth() -> None:
    rows = on_fabrics({"nvlink": (100.0, 110.0), "shm": (130.0, 120.0)}) + bandwidths((300, 320), (10, 20))
    rows.append(row(median_ms=90.0, fabric="nvlink", **HEADS, **ULYSSES, exchange="copy_engines"))
    assert len(place_of(rows).points) == 4
    rows.append(collective("nvlink", "all_to_all", 350, exchange="copy_engines"))
    point = next(p for p in place_of(rows).points if p.measured_ms == 90.0)
    assert point.primitive == "all_to_all by copy engines"
    assert point.communication_ms == pytest.approx(1e3 * 560 * MIB / (350 * GIB))


def test_all_to_all_adds_to_compute_and_a_ring_hides_behind_it() -> None:
    rows = on_fabrics({"nvlink": (100.0, 210.0), "shm": (150.0, 220.0)}) + bandwidths((300, 320), (10, 20))
    points = {(p.cell.asked["method"], p.fabric): p for p in place_of(rows).points}
    nvlink, shm = points["ulysses", "nvlink"], points["ulysses", "shm"]
    assert nvlink.predicted_ms == pytest.approx(100.0)
    assert shm.predicted_ms == pytest.approx(100.0 - nvlink.communication_ms + shm.communication_ms)
    ring = points["ring", "shm"]
    assert 0 < ring.communication_ms < ring.compute_ms == pytest.approx(ring.predicted_ms) == pytest.approx(210.0)
    assert (nvlink.calibrates, shm.calibrates) == (True, False)


def test_a_step_shorter_than_its_messages_leaves_no_compute() -> None:
    rows = on_fabrics({"nvlink": (1e-3, 1e-3), "shm": (150.0, 120.0)}) + bandwidths((300, 320), (10, 20))
    for point in place_of(rows).points:
        assert point.compute_ms == pytest.approx(0.0, abs=1e-9)
        assert point.predicted_ms == pytest.approx(point.communication_ms)


def test_a_measured_compute_only_arm_is_the_compute_time_and_leaves_nothing_to_calibrate() -> None:
    rows = on_fabrics({"nvlink": (100.0, 110.0), "shm": (150.0, 120.0)}) + bandwidths((300, 320), (10, 20))
    rows = [r | {"compute_only_step_ms": [96.0, 97.0, 98.0]} if r["workload"] == "attention" else r for r in rows]
    for point in place_of(rows).points:
        assert point.compute_ms == 97.0
        assert not point.calibrates


@pytest.mark.parametrize(
    ("ulysses_ms", "ring_ms", "replicates", "outcome"),
    [
        ([100.0], [120.0], 1, "agrees"),
        ([120.0], [100.0], 1, "differs"),
        ([120.0] * 6, [100.0, 101.0, 102.0, 103.0, 104.0, 105.0], 6, "differs"),
        ([100.0, 104.0, 101.0, 105.0, 102.0, 106.0], [103.0, 100.0, 104.0, 101.0, 105.0, 102.0], 6, "undecided"),
    ],
)
def test_bytes_that_name_another_winner_are_wrong_only_where_the_paired_interval_says_so(
    ulysses_ms: list[float], ring_ms: list[float], replicates: int, outcome: str
) -> None:
    rows = bandwidths((20, 20), (20, 20)) + on_fabrics({"nvlink": (9.0, 10.0)})
    for r in range(replicates):
        for ms, method in ((ulysses_ms[r], ULYSSES), (ring_ms[r], RING)):
            rows.append(row(median_ms=ms, replicate=r, fabric="shm", **HEADS, **method))
    points = place_of(rows).on("shm")
    judgement = fabrics.judge(points, lambda p: p.communication_ms, calibrated=False)
    assert judgement.winner.cell.asked["method"] == "ulysses"
    assert judgement.outcome == outcome


def test_bytes_alone_name_the_fastest_way_to_send_as_many_of_them() -> None:
    rows = bandwidths((20, 20), (20, 20)) + on_fabrics({"nvlink": (9.0, 10.0), "shm": (120.0, 110.0)})
    rows += [row(median_ms=ms, fabric="shm", **HEADS, **ULYSSES, head_chunks=n) for n, ms in ((2, 100.0), (7, 130.0))]
    (place,) = places(cells_of(rows))
    judgement = fabrics.judge(place.on("shm"), lambda p: p.communication_ms, calibrated=False)
    assert judgement.winner.cell.asked["head_chunks"] == 2
    assert judgement.outcome == "agrees"
    (sentence, *_) = map(plain, sections_of(rows)["fabrics"].points)
    assert "ulysses, ulysses head_chunks=2, ulysses head_chunks=7 send 0.417 of the bytes" in sentence
    slower = [p for p in place.on("shm") if p.cell.asked["head_chunks"] == 7 or p.cell.asked["method"] == "ring"]
    assert fabrics.judge(slower, lambda p: p.measured_ms, calibrated=False).winner.measured_ms == 110.0


def test_fabric_words_hold_the_byte_ratio_of_the_rows_and_the_closed_form() -> None:
    rows = on_fabrics({"nvlink": (100.0, 110.0), "shm": (130.0, 120.0)}) + bandwidths((300, 300), (20, 20))
    section = sections_of(rows)["fabrics"]
    text = " ".join(map(plain, section.points))
    assert "ulysses sends 0.417 of the bytes of ring zigzag, 0.625 in the forward" in text
    assert "(G+1)/P = 0.625" in text
    assert "2(G+1)/(3P) = 0.417" in text
    assert "names the fastest method in 1 of 2 pairs of shape and fabric" in plain(section.words[0])
    assert "at 131,072 tokens, 32/8 heads, 8 ranks, on shm (1.08x)" in plain(section.words[0])


def test_winners_by_fabric_are_one_table_that_stars_what_is_not_proven() -> None:
    rows = bandwidths((300, 300), (20, 20)) + on_fabrics({"shm": (130.0, 120.0)})
    rows += on_fabrics({"nvlink": (100.0, 110.0)}, replicates=6)
    (table, _) = sections_of(rows)["fabrics"].tables
    nvlink, shm = (texts(line) for line in table.lines)
    assert nvlink[1:] == (
        *("nvlink (300 GiB/s)", "ulysses", "100", "ring zigzag", "1.10x [1.10, 1.10]"),
        *("ulysses, agrees", "ulysses, calibrated here"),
    )
    assert shm[2:6] == ("ring zigzag *", "120", "ulysses", "1.083x")
    assert shm[6] == "ulysses, differs (1.083x)"


def test_the_next_of_a_fabric_is_the_best_of_another_method() -> None:
    rows = bandwidths((300, 300), (20, 20)) + on_fabrics({"nvlink": (100.0, 110.0), "shm": (130.0, 160.0)})
    rows.append(row(median_ms=120.0, fabric="shm", **HEADS, **ULYSSES, head_chunks=2))
    _, shm = (texts(line) for line in sections_of(rows)["fabrics"].tables[0].lines)
    assert shm[2:6] == ("ulysses head_chunks=2 *", "120", "ring zigzag", "1.333x")
    alone = [r for r in rows if r["method"] == "ulysses"] + [
        row(median_ms=1.0, fabric="nvlink", **HEADS, **ULYSSES, head_chunks=2)
    ]
    _, shm = (texts(line) for line in sections_of(alone)["fabrics"].tables[0].lines)
    assert shm[2:6] == ("ulysses head_chunks=2 *", "120", "ulysses", "1.083x")


def test_cells_on_a_fabric_without_bandwidth_are_named_and_not_drawn() -> None:
    rows = on_fabrics({"nvlink": (100.0, 110.0), "shm": (130.0, 120.0), "socket": (900.0, 800.0)})
    section = sections_of(rows + bandwidths((300, 300), (20, 20)))["fabrics"]
    assert any("ring zigzag on socket at 8 ranks" in plain(words) for words in section.words)
    assert all("socket" not in texts(line) for table in section.tables for line in table.lines)


def test_lengths_and_heads_share_a_fabric_figure_and_passes_do_not() -> None:
    rows = on_fabrics({"nvlink": (100.0, 110.0), "shm": (130.0, 120.0)}) + bandwidths((300, 300), (20, 20))
    rows += [row(**{**r, "median_ms": 9.0, "seq_len": 32768}) for r in _asked(rows)]
    rows += [row(**{**r, "median_ms": 8.0, "pass_kind": "forward"}) for r in _asked(rows[:4])]
    section = sections_of(rows)["fabrics"]
    assert len(section.tables) == 4
    assert [len(each) for each in by_figure(places(cells_of(rows))).values()] == [1, 2]


def _asked(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    kept = ("fabric", *HEADS, *RING, "ulysses_degree")
    return [{k: r.get(k) for k in kept} for r in rows if r["workload"] == "attention"]


def test_a_series_has_one_name_on_every_fabric_and_settings_still_do_not_mix_them() -> None:
    rows = on_fabrics({"nvlink": (100.0, 110.0), "shm": (130.0, 120.0)})
    rows.append(row(fabric="nvlink", kernel="flash_attn", **HEADS, **ULYSSES))
    found = cells_of(rows)
    assert {c.series for c in found if c.asked["method"] == "ulysses" and c.asked["fabric"] == "shm"} == {
        "ulysses cpu_flash"
    }
    assert len({c.setting for c in found}) == 2
    assert len({c.over_fabrics for c in found}) == 1


def test_collective_rows_are_in_the_tables_and_in_no_comparison_or_figure() -> None:
    rows = bandwidths((300, 300), (20, 20))
    page = page_of(rows)
    assert "nothing to compare" in page.text
    assert 'id="interconnect"' in page.html
    assert draw(cells_of(rows))[0] == []
    assert {(c.setting, c.series) for c in cells_of(rows)} == {
        (f"collective exchange: float32, {fabric}, cpu", primitive)
        for fabric in ("nvlink", "shm")
        for primitive in ("all_to_all", "send_recv")
    }


# where the time goes


def alone_and_method(replicates: int, **method: Any) -> list[dict[str, Any]]:
    one = {"method": "single", "sp_size": 1, "ring_degree": 1, "num_heads": 4, "num_kv_heads": 1}
    arms: dict[str, Any] = {"compute_only_step_ms": [10.2] * 5, "comm_only_step_ms": [2.0] * 5}
    arms |= {"imbalance_ms": 0.1, "exposed_comm_ms": 0.8, "overlap_efficiency": 0.6}
    rows = [row(median_ms=10.0 + 0.01 * r, replicate=r, **{**HEADS, **one}) for r in range(replicates)]
    rows += [
        row(median_ms=11.0 + 0.01 * r, replicate=r, **{**HEADS, **ULYSSES, **arms, **method}) for r in range(replicates)
    ]
    return rows


def test_the_kernel_alone_is_single_with_1_of_p_of_the_heads_at_the_same_length_and_kernel() -> None:
    rows = alone_and_method(1)
    one = {"method": "single", "sp_size": 1, "ring_degree": 1}
    rows += [row(median_ms=1.0, **{**HEADS, **one, "num_heads": 4, "num_kv_heads": 1, **other}) for other in DECOYS]
    (found,) = attributions(cells_of(rows))
    assert (found.alone_ms, found.compute_only_ms) == (10.0, 10.2)
    assert (found.imbalance, found.exposed) == (Part(0.1, None), Part(0.8, None))
    assert found.beyond_kernel is not None
    assert found.beyond_kernel.ms == pytest.approx(0.2)


DECOYS: tuple[dict[str, Any], ...] = (
    *({"num_heads": 8}, {"num_kv_heads": 2}, {"seq_len": 65536}, {"kernel": "math"}, {"pass_kind": "forward"}),
    *({"dtype": "float32"}, {"head_dim": 64}, {"causal": False}, {"batch_size": 2}, {"hardware": "h100"}),
)


def test_kv_heads_fewer_than_ranks_are_replicated_in_the_kernel_alone_too() -> None:
    (found,) = attributions(cells_of(alone_and_method(1, num_kv_heads=4)))
    assert found.alone_ms == 10.0


@pytest.mark.parametrize(("replicates", "interval"), [(1, False), (5, False), (6, True)])
def test_the_fraction_of_the_kernel_alone_has_an_interval_from_6_pairs_on(replicates: int, interval: bool) -> None:
    section = sections_of(alone_and_method(replicates))["attribution"]
    (sentence,) = map(plain, section.points)
    assert ("coverage 96.9%" in sentence) == interval
    assert ("no interval" in sentence) != interval
    assert "0.909" in sentence
    beyond = "0.175 [0.150, 0.200]" if replicates == 6 else "0.180" if replicates == 5 else "0.200"
    assert f"{beyond} ms is compute beyond the kernel" in sentence
    bounds = " [0.100, 0.100]" if interval else ""
    assert f"; 0.100{bounds} ms is imbalance, the slowest rank - the mean; " in sentence
    assert "unsettled" not in sentence
    bounds = " [0.800, 0.800]" if interval else ""
    alone = "which alone, with its packing and merging, takes 2.00 ms"
    assert f"0.800{bounds} ms is exposed communication, {alone}" in sentence
    assert "communication with its packing and merging, which compute only has too" in section.tables[0].caption


def test_no_bound_of_the_fraction_is_printed_as_1() -> None:
    took_ms = {"single": 10.0003, "ulysses": 10.0}
    rows = [each | {"median_step_ms": took_ms[each["method"]]} for each in alone_and_method(6)]
    (found,) = attributions(cells_of(rows))
    assert found.fraction_words == "1.00003 [1.00003, 1.00003]"


@pytest.mark.parametrize(("uuid", "interval"), [("a", True), ("x", False)])
def test_compute_beyond_the_kernel_has_no_interval_where_the_kernel_ran_on_other_devices(
    uuid: str, interval: bool
) -> None:
    rows = alone_and_method(6)
    for each in rows:
        each["environment"] = ENVIRONMENT | {"device_uuids": [uuid if each["method"] == "single" else "a"]}
    (found,) = attributions(cells_of(rows))
    assert found.beyond_kernel is not None
    assert found.beyond_kernel.ms == pytest.approx(10.2 - 10.025)
    assert (found.beyond_kernel.interval is not None) == interval


def test_attribution_links_times_to_the_cell_and_shares_to_the_kernel_alone_too() -> None:
    (line,) = sections_of(alone_and_method(6))["attribution"].tables[0].lines
    methods = {
        ATTRIBUTION_HEAD[i]: [c.asked["method"] for c in entry.cells]
        for i, entry in enumerate(line.texts)
        if isinstance(entry, Ref)
    }
    assert [c.asked["method"] for c in line.cells] == ["ulysses"]
    assert methods == {
        "kernel alone (ms)": ["single"],
        "alone / step": ["ulysses", "single"],
        "compute beyond the kernel (ms)": ["ulysses", "single"],
    }


def test_attribution_needs_no_kernel_alone() -> None:
    (line,) = sections_of(alone_and_method(1)[1:])["attribution"].tables[0].lines
    assert all(texts(line)[place] == "\N{EN DASH}" for place in (3, 7, 8))


def test_without_arms_nothing_is_said_of_them() -> None:
    arms = dict.fromkeys(("compute_only_step_ms", "comm_only_step_ms", "imbalance_ms", "exposed_comm_ms"))
    arms |= {"overlap_efficiency": None}
    (table,) = sections_of([r | arms for r in alone_and_method(1)])["attribution"].tables
    assert table.head == (*ATTRIBUTION_HEAD[:4], "step (ms)", "alone / step")
    assert texts(table.lines[0])[3:] == ("10.0", "11.0", "0.909")
    assert "only" not in table.caption


def test_an_arm_that_became_faster_while_it_was_timed_is_named() -> None:
    section = sections_of(alone_and_method(1, comm_only_step_ms=[3.0, 3.0, 3.0, 2.0, 2.0]))["attribution"]
    (sentence,) = map(plain, section.points)
    assert sentence.endswith("; unsettled: comm only.")


def test_rows_without_any_part_of_the_time_give_no_attribution() -> None:
    assert sections_of([row()]) == {}


def test_whether_a_cell_was_taken_apart_does_not_set_it_apart() -> None:
    workloads = [{"attribution": flag} for flag in (True, False)]
    rows = [row(config=json.dumps({"workload": w}), sp_size=n) for w, n in zip(workloads, (2, 4), strict=True)]
    assert len({c.setting for c in cells_of(rows)}) == 1


# other libraries


def rivalry(replicates: int = 6) -> list[dict[str, Any]]:
    theirs = {"implementation": "DeepSpeed 0.19.8", "primitive": "all_to_all"}
    zigzag = {"implementation": "ring-flash-attn 0.1.8", "primitive": "send_recv"}
    runs: list[tuple[float, dict[str, Any]]] = [
        (18.0, {**ULYSSES, **theirs, "method": "deepspeed_ulysses", "kernel": "flash_attn"}),
        (20.0, {**RING, **zigzag, "method": "ring_flash_attn", "kernel": "flash_attn"}),
        (17.0, {**ULYSSES, "kernel": "flash_attn"}),
        (10.0, {**ULYSSES, "kernel": "flash_attn_4"}),
        (21.0, {**RING, "kernel": "flash_attn"}),
        (11.0, {**RING, "kernel": "flash_attn_4"}),
        (5.0, {**RING, "kernel": "flash_attn_4", "layout": "striped"}),
    ]
    return [
        row(median_ms=ms * (1 + 0.001 * ((r * 7 + k) % 5)), replicate=r, **HEADS, **columns)
        for k, (ms, columns) in enumerate(runs)
        for r in range(replicates)
    ]


def test_a_library_is_compared_with_our_method_of_its_kind_and_layout_by_kernel() -> None:
    (table,) = sections_of(rivalry())["rivals"].tables
    compared_with = {(texts(line)[0], texts(line)[5]): texts(line)[6] for line in table.lines}
    assert compared_with == {
        ("deepspeed_ulysses (DeepSpeed 0.19.8)", "same kernel"): "ulysses flash_attn",
        ("deepspeed_ulysses (DeepSpeed 0.19.8)", "our fastest kernel"): "ulysses flash_attn_4",
        ("deepspeed_ulysses (DeepSpeed 0.19.8)", "any method of ours"): "ring striped flash_attn_4",
        ("ring_flash_attn zigzag (ring-flash-attn 0.1.8)", "same kernel"): "ring zigzag flash_attn",
        ("ring_flash_attn zigzag (ring-flash-attn 0.1.8)", "our fastest kernel"): "ring zigzag flash_attn_4",
        ("ring_flash_attn zigzag (ring-flash-attn 0.1.8)", "any method of ours"): "ring striped flash_attn_4",
    }


def test_a_library_that_is_faster_is_said_to_be() -> None:
    points = list(map(plain, sections_of(rivalry())["rivals"].points))
    ring = next(p for p in points if "ring_flash_attn" in p)
    assert "takes 0.95" in ring.partition("with the same kernel, ring zigzag flash_attn")[0]
    assert "coverage 96.9%" in ring


def test_libraries_are_compared_by_medians_without_6_pairs() -> None:
    points = list(map(plain, sections_of(rivalry(2))["rivals"].points))
    assert points
    assert all("by medians of 2 replicates, no interval" in p for p in points)


def test_libraries_have_names_that_say_whose_code_they_are() -> None:
    names = {c.series for c in cells_of(rivalry(1)) if c.asked["implementation"] != "sp_bench"}
    assert names == {"deepspeed_ulysses (DeepSpeed 0.19.8)", "ring_flash_attn zigzag (ring-flash-attn 0.1.8)"}


# error and speed


def with_options(**columns: Any) -> list[dict[str, Any]]:
    made = []
    for travelling in ("input", "float32"):
        for merged in ("input", "float32"):
            error = 1e-3 * (1 + (travelling == "input") + (merged == "input"))
            made.append(
                row(
                    config=config(name="ring", merge_dtype=merged, dkv_dtype=travelling),
                    attention_flops_per_s=1e12,
                    rel_error_dk=error,
                    **{**RING, "dkv_dtype": travelling, **columns},
                )
            )
    return made


def test_error_and_speed_needs_two_options_of_one_method() -> None:
    rows = with_options()
    ulysses = row(attention_flops_per_s=1e12, config=config(name="ulysses"), **ULYSSES)
    assert compared(cells_of([rows[0], ulysses])) == []
    points = compared(cells_of([*rows, ulysses]))
    assert {options(p.cell) for p in points} == {
        (None, None),
        *((a, b) for a in ("input", "float32") for b in ("input", "float32")),
    }
    assert {p.gradient for p in points if p.cell.asked["method"] == "ring"} == {"dk"}


def test_options_have_series_of_their_own() -> None:
    section = sections_of([*with_options(), *with_options(seq_len=2048)])["errors"]
    (table,) = section.tables
    assert [texts(line)[0] for line in table.lines] == [
        f"ring zigzag dkv_dtype={a} merge_dtype={b}" for a in ("float32", "input") for b in ("float32", "input")
    ]
    assert {texts(line)[2] for line in table.lines} == {"2,048"}


# the device


def state(*reasons: str) -> dict[str, Any]:
    clocks = {"sm_clock_mhz": 1755, "memory_clock_mhz": 3201}
    return clocks | {"power_w": 650.0, "temperature_c": 60, "throttle_reasons": list(reasons)}


def test_device_table_gives_power_wire_bytes_and_kernels() -> None:
    sent = row()["comm_counted_bytes"]
    known = {"energy_j": [6.0, 6.5], "device_state": [state(), state()], "launched_kernels": ["fwd", "bwd<int>"]}
    section = sections_of([row(comm_wire_bytes=1.02 * sent, **known)])["device"]
    (line,), (kernels,) = (table.lines for table in section.tables)
    assert texts(line)[3:8] == ("12.5", "625", "1,755", "60", "\N{EN DASH}")
    assert texts(line)[10:] == ("+2.00%", "2 kernels")
    assert texts(kernels) == ("cpu_flash", "1 cell", "bwd<int>\nfwd")
    assert line.note == ""


@pytest.mark.parametrize(
    ("reason", "marked"), [("sw_power_cap", True), ("hw_thermal_slowdown", True), ("gpu_idle", False)]
)
def test_cells_throttled_by_power_or_heat_are_marked_wherever_they_are_listed(reason: str, marked: bool) -> None:
    rows = [row(device_state=[state(), state(reason)])]
    section = sections_of(rows)["device"]
    assert (section.tables[0].lines[0].note == f"throttled: {reason}") == marked
    assert (page_of(rows).text.count(f"throttled: {reason}") == 2) == marked


def test_columns_that_are_not_known_are_dashes_and_cells_without_any_are_counted() -> None:
    section = sections_of([row(energy_j=[1.0, 1.0]), row(seq_len=2048)])["device"]
    ((line,),) = (table.lines for table in section.tables)
    assert texts(line)[9:] == ("\N{EN DASH}",) * 3
    assert any("1 cell without any of these columns" in plain(words) for words in section.words)


# all together


def everything() -> list[dict[str, Any]]:
    rows = on_fabrics({"nvlink": (100.0, 110.0), "shm": (130.0, 120.0)}) + bandwidths((300, 300), (20, 20))
    return [*rows, *alone_and_method(6), *rivalry(6), *with_options(), row(energy_j=[1.0, 1.0])]


def test_the_same_rows_give_the_same_page_with_every_section_whatever_their_order() -> None:
    page = page_of(everything())
    assert page.html == page_of(everything()[::-1]).html
    for anchor in ("rivals", "attribution", "fabrics", "interconnect", "errors", "device"):
        assert f'<h2 id="{anchor}">' in page.html
    assert {address[1:] for address, _ in page.links} <= set(page.ids)


def test_a_drawing_of_a_sections_kind_is_shown_there_and_any_other_under_figures() -> None:
    drawings = [
        Drawing(kind, "one setting", {}, f"{kind}-x", "What it shows.", "24 rows", 690, {"png": b"picture"})
        for kind in ("device", "memory")
    ]
    html = page_of([row(energy_j=[1.0, 1.0])], drawings).html
    places = [
        html.index(mark) for mark in ('id="figures"', "memory-x.png", 'id="device"', "device-x.png", 'id="tables"')
    ]
    assert places == sorted(places)
    assert html.count("24 rows") == 2


def test_markup_in_names_stays_text_in_every_section() -> None:
    bad = "<b>x</b>"
    rows = [r | {"fabric": r["fabric"].replace("shm", bad)} for r in everything()]
    rows.append(row(launched_kernels=[bad], implementation=bad, method="mine"))
    html = page_of(rows).html
    assert bad not in html
    assert "&lt;b&gt;x&lt;/b&gt;" in html


def test_a_page_without_such_rows_has_none_of_the_sections() -> None:
    assert sections(cells_of([row(), row(status="oom", seq_len=2048)])) == []
