"""Ratios are of replicates of one campaign and machine, and what ran in no such pair is not compared."""

import itertools
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from sp_bench.analysis.cells import Cell, cells
from sp_bench.analysis.comparison import compare
from sp_bench.analysis.ratios import of_one_machine, paired_ratio, shared_replicates
from sp_bench.analysis.selection import select
from sp_bench.analysis.settings import APART, CLOSE, Difference, Place, leader, settings
from sp_bench.analysis.signs import counts, signs
from sp_bench.analysis.time_parts import attributions, kernels_alone
from sp_bench.formats import MISSING
from sp_bench.report.cards import card, verdict
from sp_bench.report.caveats import machine_spread
from sp_bench.report.setting_tables import tables

from .rows import ENVIRONMENT, STARTED_AT, cells_of, commit, row

METHODS = {
    "ulysses": {"method": "ulysses", "ulysses_degree": 2, "ring_degree": 1},
    "ring": {},
    "all_gather": {"method": "all_gather"},
}
GPU = {
    "config": json.dumps({"hardware": {"name": "h200", "device": "cuda"}}), "hardware": "h200", "fabric": "nvlink",
    "kernel": "cudnn", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16",
}  # fmt: skip

SECONDS = itertools.count()


def on(machine: str, ms: dict[str, float], replicates: int = 1, first: int = 0) -> list[dict[str, Any]]:
    """Rows of methods by their step times, a launch each for so many replicates, each at a time of its own: rows of one
    time would be copies."""
    devices = ENVIRONMENT | {"device_names": ["NVIDIA H200"] * 2, "device_uuids": [f"{machine}0", f"{machine}1"]}
    return [
        row(
            **GPU,
            **METHODS[method],
            median_ms=time,
            replicate=first + r,
            environment=devices,
            started_at=STARTED_AT + timedelta(seconds=next(SECONDS)),
        )
        for method, time in ms.items()
        for r in range(replicates)
    ]


def cells_in(folder: Path, campaigns: dict[str, list[dict[str, Any]]]) -> list[Cell]:
    return cells(select([commit(rows, folder / name) for name, rows in campaigns.items()]).rows)


def place_of(found: list[Cell]) -> Place:
    (setting,) = settings(found)
    assert setting.main is not None
    return setting.main


def test_a_ratio_is_of_the_replicates_that_pair_and_not_of_those_of_one_side_alone(tmp_path: Path) -> None:
    """All replicates of Ulysses have the median 8, by which the ring would take 1.5x as long."""
    found = cells_in(tmp_path, {"a": on("x", {"ulysses": 10, "ring": 12}), "b": on("y", {"ulysses": 8}, 3)})
    place = place_of(found)
    (difference,) = place.differences
    assert (difference.ratio, difference.words, difference.overlaps) == (1.2, "1.20x", False)
    assert verdict(place) == "By medians, without intervals, Ulysses is 1.20x as fast as the contiguous ring."
    assert [sign.ratio for sign in signs(settings(found), "ring")] == [1.2]


def test_what_never_ran_side_by_side_is_not_compared(tmp_path: Path) -> None:
    campaigns = {"a": on("x", {"ulysses": 10, "ring": 12}), "b": on("y", {"all_gather": 9})}
    place = place_of(found := cells_in(tmp_path, campaigns))
    ulysses, ring, gather = (next(c for c in found if c.asked["method"] == name) for name in METHODS)
    apart = Difference(ulysses, gather)
    assert (apart.ratio, apart.outcome, apart.words) == (None, APART, MISSING)
    assert (place.leader, place.rival, place.best[0]) == (ulysses, ring, gather)
    told = card(settings(found)[0])
    assert told.verdict.endswith(
        "is 1.20x as fast as the contiguous ring. Not compared with it, since no replicates pair: the contiguous "
        "all-gather."
    )
    (table,) = tables(settings(found))
    assert [table.texts(line)[-1] for line in table.lines] == ["", MISSING, "1.20x"]
    assert verdict(place_of([gather, ring])) == (
        "Not compared, since no replicates pair: the contiguous all-gather and the contiguous ring."
    )


def test_separate_machines_of_one_campaign_are_no_pair_either(tmp_path: Path) -> None:
    campaign = on("x", {"ulysses": 10}) + on("y", {"ring": 12})
    (difference,) = place_of(cells_in(tmp_path, {"a": campaign})).differences
    assert difference.outcome == APART


@pytest.mark.parametrize("faster", [5.0, 20.0])
def test_a_campaign_of_one_method_alone_changes_no_proven_result(tmp_path: Path, faster: float) -> None:
    """On a faster or a slower machine, so that the median over all replicates names the one or the other first."""
    proven = on("x", {"ulysses": 10.0, "ring": 9.5}, 6)
    alone = place_of(cells_in(tmp_path / "1", {"a": proven}))
    both = place_of(cells_in(tmp_path / "2", {"a": proven, "b": on("y", {"ulysses": faster}, 9)}))
    assert verdict(both) == verdict(alone)
    assert verdict(both) == "The contiguous ring is 1.05x [1.05, 1.05] as fast as Ulysses."


def test_the_interval_is_of_the_campaign_and_machine_with_the_most_pairs(tmp_path: Path) -> None:
    campaigns = {
        "a": on("x", {"ulysses": 10, "ring": 20}, 5),
        "b": on("x", {"ulysses": 10, "ring": 11}, 6) + on("y", {"ulysses": 10, "ring": 30}, 3, first=6),
    }
    ring, ulysses = sorted(cells_in(tmp_path, campaigns), key=lambda c: c.asked["method"])
    shared = shared_replicates(ring, ulysses)
    paired = paired_ratio(ring, ulysses)
    assert paired is not None
    assert (len(shared), len(of_one_machine(shared, ring, ulysses)), paired.pairs, paired.ratio) == (14, 6, 6, 1.1)
    assert ring.interval_ms is None
    assert paired_ratio(ring, ulysses, "a") is None


def test_pairs_of_several_campaigns_give_no_ratio_together(tmp_path: Path) -> None:
    """By the medians over all of them Ulysses would be 1.58x as fast."""
    campaigns = {
        "a": on("x", {"ulysses": 10, "ring": 9.5}) + on("y", {"ulysses": 20, "ring": 19}, first=1),
        "b": on("x", {"ulysses": 12, "ring": 20}),
    }
    place = place_of(cells_in(tmp_path, campaigns))
    assert verdict(place) == "By medians, without intervals, the contiguous ring is 1.05x as fast as Ulysses."
    assert not place.differences[0].overlaps


def test_a_machine_that_some_rows_do_not_name_is_the_one_that_the_others_name(tmp_path: Path) -> None:
    rows = on("x", {"ulysses": 10, "ring": 11}, 6)
    for each in rows[::2]:
        each["environment"] = {**each["environment"], "device_uuids": None}
    found = cells_in(tmp_path, {"a": rows})
    paired = paired_ratio(*sorted(found, key=lambda c: c.asked["method"]))
    assert paired is not None
    assert paired.pairs == 6


def test_whoever_is_ahead_of_the_leader_is_named_as_the_faster_one(tmp_path: Path) -> None:
    """Each is ahead of another in a campaign of its own, so that none leads."""
    campaigns = {
        "a": on("x", {"ulysses": 10, "ring": 9}, 6),
        "b": on("y", {"ring": 10, "all_gather": 9}, 6),
        "c": on("z", {"all_gather": 10, "ulysses": 9}),
    }
    told = card(settings(cells_in(tmp_path, campaigns))[0])
    assert not told.proven
    assert "0.9" not in told.verdict
    assert told.verdict[0].isupper()
    assert "1.11x [1.11, 1.11] as fast as" in told.verdict


def test_equal_cells_on_separate_machines_are_counted_by_their_code(tmp_path: Path) -> None:
    campaigns = {"a": on("x", {"ulysses": 10}), "b": on("y", {"ulysses": 11})}
    assert machine_spread(cells_in(tmp_path / "1", campaigns)) == (pytest.approx(0.1), 1, 1)
    campaigns["b"] = [each | {"env_id": "f" * 8, "core_id": "f" * 8} for each in campaigns["b"]]
    assert machine_spread(cells_in(tmp_path / "2", campaigns)) == (pytest.approx(0.1), 1, 0)
    assert machine_spread(cells_in(tmp_path / "3", {"a": campaigns["a"]})) is None


def test_replicates_of_two_campaigns_have_no_interval_together(tmp_path: Path) -> None:
    halves = {name: on("x", {"ulysses": 10, "ring": 11}, 3) for name in ("a", "b")}
    found = cells_in(tmp_path, halves)
    assert [len(cell.step_ms) for cell in found] == [6, 6]
    assert [cell.interval_ms for cell in found] == [None, None]
    assert paired_ratio(*found) is None
    (count,) = counts(settings(found))
    assert count.ratios == {"a": 1.1, "b": 1.1}


def test_the_leader_is_whom_most_ran_beside_unless_another_is_faster_than_it(tmp_path: Path) -> None:
    """Ulysses ran beside both others, which never met."""
    for ring, first in ((9.9, "ulysses"), (9.0, "ring")):
        campaigns = {
            "a": on("x", {"ulysses": 10, "ring": ring}),
            "b": on("y", {"ulysses": 10, "all_gather": 10.1}),
        }
        found = cells_in(tmp_path / first, campaigns)
        assert leader(found, 0.02).asked["method"] == first
        assert Difference(*sorted(found, key=lambda c: c.asked["method"])[:2]).outcome == APART
    assert Difference(found[0], found[0]).outcome == CLOSE


def test_what_computes_beyond_the_kernel_is_of_replicates_that_pair(tmp_path: Path) -> None:
    """A kernel alone of another machine says nothing of it."""
    single = GPU | {"method": "single", "sp_size": 1, "num_heads": 16, "num_kv_heads": 4, "layout": "contiguous"}
    arms = {"compute_only_step_ms": [8.0] * 5, "exposed_comm_ms": 2.0}
    for machine, expected in (("x", 1.0), ("y", None)):
        ours = [each | arms for each in on("x", {"ulysses": 10})]
        (ring,) = on(machine, {"ring": 7.0})
        alone = [row(**single, median_ms=7.0, environment=ring["environment"])]
        (found,) = attributions(cells_in(tmp_path / machine, {"a": ours + alone}))
        assert found.alone is not None
        assert (None if found.beyond_kernel is None else found.beyond_kernel.ms) == expected
        assert found.fraction == (MISSING if expected is None else "0.700", "")


def test_the_kernel_alone_is_found_by_its_key_however_many_cells_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of each cell are compared once, not with every other cell."""
    lengths = range(1024, 1024 * 21, 1024)
    single = {"method": "single", "sp_size": 1, "num_heads": 16, "num_kv_heads": 4}
    alone = [row(**GPU | single, seq_len=seq_len) for seq_len in lengths]
    found = cells_of(alone + [row(**GPU, seq_len=seq_len) for seq_len in lengths])
    options, compared = Cell.but, []
    monkeypatch.setattr(Cell, "but", lambda cell, *names: compared.append(cell) or options(cell, *names))
    by_id = {cell.cell_id: cell for cell in found}
    pairs = [(by_id[cell_id], single) for cell_id, single in kernels_alone(found).items()]
    assert [(cell.asked["seq_len"], cell.asked["sp_size"]) for cell, _ in pairs] == [(n, 2) for n in lengths]
    assert [(single.asked["seq_len"], single.asked["sp_size"]) for _, single in pairs] == [(n, 1) for n in lengths]
    assert len(compared) == len(found)


def test_a_comparison_marks_the_cells_that_ran_on_separate_machines(tmp_path: Path) -> None:
    before = commit(on("x", {"ulysses": 10, "ring": 12}), tmp_path / "before")
    after = commit(on("y", {"ulysses": 9}) + on("x", {"ring": 12}), tmp_path / "after")
    found = compare(before, after)
    assert {pair.a.asked["method"]: pair.on_separate_devices for pair in found.pairs} == {
        "ulysses": True,
        "ring": False,
    }
    assert found.differences() == ["separate devices, by their UUIDs, of 1 of 2 cells"]
    assert [pair["separate_devices"] for pair in found.as_json()["pairs"]] == [False, True]
    slower = compare(after, before).regressions(0.05)
    assert [line.rpartition("H200; ")[2].endswith("no interval, on separate devices") for line in slower] == [True]
