"""Rows of separate devices are told apart, and a page says where they are compared."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.analysis.cells import Cell, cells
from sp_bench.analysis.comparison import compare
from sp_bench.analysis.device_sets import numbered, several
from sp_bench.analysis.provenance import origin
from sp_bench.analysis.ratios import paired_ratio, shared_replicates
from sp_bench.analysis.selection import select
from sp_bench.analysis.time_parts import Part, attributions

from .rows import ENVIRONMENT, commit, row

ULYSSES = {"method": "ulysses", "ulysses_degree": 2, "ring_degree": 1}


def on(*uuids: str) -> dict[str, Any]:
    return ENVIRONMENT | {"device_names": ["NVIDIA H200"] * len(uuids), "device_uuids": list(uuids)}


def two_cells(folder: Path, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[Cell]:
    """A ring and Ulysses, a replicate for each environment."""
    rows = [row(median_ms=12.0, replicate=r, environment=e) for r, e in enumerate(first)]
    rows += [row(median_ms=10.0, replicate=r, environment=e, **ULYSSES) for r, e in enumerate(second)]
    return cells(select([commit(rows, folder)]).rows)


def test_rows_that_share_a_device_are_of_one_set_in_whatever_spelling() -> None:
    known, unknown = (
        [on("a", "b"), on("GPU-b", "c"), on("x"), on("GPU-a")],
        [on(), on(""), None, {"device_uuids": None}],
    )
    assert list(numbered(known)) == [1, 1, 2, 1]
    assert list(numbered([*unknown, *known]).isna()) == [True] * 4 + [False] * 4


def test_a_row_joins_sets_that_share_nothing_themselves() -> None:
    assert list(numbered([on("a"), on("b"), on("c"), on("a", "b")])) == [1, 1, 2, 1]


@given(st.lists(st.sets(st.sampled_from("abcdefg"), min_size=1, max_size=3), max_size=8), st.randoms())
def test_sets_are_the_connected_components_whatever_the_rows_order(used: list[set[str]], random: Any) -> None:
    numbers = list(numbered([on(*sorted(each)) for each in used]))
    reached = np.array([[bool(a & b) for b in used] for a in used], dtype=int).reshape(len(used), len(used))
    for _ in used:
        reached = (reached @ reached > 0).astype(int)
    assert [[a == b for b in numbers] for a in numbers] == (reached > 0).tolist()
    order = random.sample(range(len(used)), len(used))
    assert list(numbered([on(*sorted(used[i])) for i in order])) == [numbers[i] for i in order]


def test_several_says_nothing_of_one_set_or_of_none() -> None:
    assert (several([1, None, 1]), several([None]), several([])) == ("", "", "")
    assert several([1, 2, None, 2]) == "2 separate sets of devices"


ONE, TWO = [on("a")] * 7, [on("a")] * 4 + [on("x")] * 3
UNKNOWN = [ENVIRONMENT] * 7


@pytest.mark.parametrize(
    ("ring", "ulysses", "pairs", "is_claimed"),
    [
        (ONE, ONE, 7, True),
        (ONE, UNKNOWN, 7, True),
        (ONE, [on("a")] * 6 + [on("x")], 6, True),
        (TWO, [on("a")] * 6 + [on("x")], 5, False),
        (TWO, TWO, 7, False),  # each pair is of one machine, and what lies between them is also what machines differ in
        (TWO, UNKNOWN, 7, False),
    ],
)
def test_pairs_and_intervals_are_of_one_machine(
    tmp_path: Path, ring: list[Any], ulysses: list[Any], pairs: int, is_claimed: bool
) -> None:
    over, under = two_cells(tmp_path / "night", ring, ulysses)
    assert len(shared_replicates(over, under)) == pairs
    assert (paired_ratio(over, under) is not None) == is_claimed
    assert (over.interval_ms is not None) == (ring is ONE)
    why = "no interval of replicates of several campaigns or machines"
    assert (why in origin([over])) == (ring is TWO)


def test_a_part_of_the_step_has_no_interval_over_separate_machines(tmp_path: Path) -> None:
    def exposed(environments: list[Any], name: str) -> Part | None:
        arms = {"compute_only_step_ms": [9.0] * 5}
        rows = [
            row(replicate=r, median_ms=10.0 + r, environment=e, exposed_comm_ms=1.0 + r, **arms)
            for r, e in enumerate(environments)
        ]
        (attribution,) = attributions(cells(select([commit(rows, tmp_path / name)]).rows))
        return attribution.exposed

    together, apart = exposed(ONE, "one"), exposed(TWO, "two")
    assert together is not None
    assert together.interval is not None
    assert apart == Part(together.ms, None)


def test_a_comparison_of_campaigns_names_separate_devices(tmp_path: Path) -> None:
    folders = [commit([row(environment=on(uuid))], tmp_path / name) for name, uuid in (("a", "a"), ("b", "x"))]
    assert compare(*folders).differences() == ["separate devices, by their UUIDs"]
    same = commit([row(environment=on("GPU-a"))], tmp_path / "c")
    assert compare(folders[0], same).differences() == []


@pytest.mark.parametrize(("before", "is_claimed"), [(ONE, True), (TWO, False), (UNKNOWN, True)])
def test_a_comparison_claims_nothing_of_a_side_that_ran_on_separate_devices(
    tmp_path: Path, before: list[Any], is_claimed: bool
) -> None:
    """Both campaigns on one machine each may be two machines, which is what is compared then, and is said."""
    environments = {"a": before, "b": [on("y")] * 7}
    folders = [
        commit([row(replicate=r, environment=e) for r, e in enumerate(each)], tmp_path / name)
        for name, each in environments.items()
    ]
    (pair,) = compare(*folders).pairs
    assert (pair.paired is not None) == is_claimed
    assert pair.ratio == 1.0


CAPPED = {"power_limit_w": [500.0, 500.0], "application_clock_mhz": [1200, 1200]}
FREE = {"power_limit_w": [700.0, 700.0]}


def test_rows_of_other_limits_of_power_are_no_replicates_and_compare_names_the_limits(tmp_path) -> None:
    kinds = {"full": FREE, "cap": CAPPED}
    folders = [
        commit(
            [row(median_ms=ms, replicate=r, environment=on("a", "b"), **kinds[name]) for r in range(3)], tmp_path / name
        )
        for name, ms in (("full", 10.0), ("cap", 11.8))
    ]
    found = cells(select(folders).rows)
    assert sorted(len(cell.step_ms) for cell in found) == [3, 3]
    assert any("NVIDIA H200 at 500 W and 1,200 MHz" in cell.pool for cell in found)
    differences = compare(*folders).differences()
    assert "power limit 700 W \N{RIGHTWARDS ARROW} 500 W" in differences


def test_a_row_that_ran_out_of_memory_has_the_limits_of_the_others_of_its_campaign(tmp_path) -> None:
    """It says none itself, and once was no end of their bracket."""
    folders = []
    for replicate, (name, limits) in enumerate({"full": FREE, "cap": CAPPED}.items()):
        machine = {"environment": on("a", "b"), "replicate": replicate}
        ran_out = row(seq_len=8192, status="oom", **machine)
        folders.append(commit([row(**machine, **limits), ran_out], tmp_path / name))
    by_folder = select(folders).rows.groupby("folder")["pool"].agg(set)
    assert {name: len(pools) for name, pools in by_folder.items()} == {"full": 1, "cap": 1}
    assert by_folder["full"] != by_folder["cap"]


@pytest.mark.parametrize(("ms", "said"), [(11.8, True), (10.5, False), (8.0, True)])
def test_campaigns_whose_equal_cells_contradict_each_other_are_not_pooled_without_a_word(tmp_path, ms, said) -> None:
    folders = [
        commit([row(median_ms=ms, replicate=r, environment=on("a", "b")) for r in range(2)], tmp_path / name)
        for name, ms in (("one", 10.0), ("two", ms))
    ]
    lines = [line for line in select(folders).problems if "as long as" in line]
    assert bool(lines) == said
    if said:
        assert "1.18x as long as one in 1 equal cell" in lines[0] or "one takes 1.25x as long as two" in lines[0]
