"""What a figure shows and that none of its words is cut off; the names of its series."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sp_bench.report import build
from sp_bench.report.cells import Cell, cells
from sp_bench.report.fabric_model import foremost, places
from sp_bench.report.figures import draw
from sp_bench.report.figures.drawings import DPI
from sp_bench.report.figures.legends import columns_within
from sp_bench.report.figures.panels import is_close, is_dots
from sp_bench.report.selection import select

from .rows import collective, commit, row

RING = {"method": "ring", "layout": "zigzag", "sp_size": 4, "primitive": "send_recv"}
ULYSSES = {"method": "ulysses", "sp_size": 4, "ulysses_degree": 4, "ring_degree": 1}
LONG = "a_library_with_a_name_longer_than_any_that_is_known_of_so_far==1.2.3.dev20260401"


def config(method: str, exchange: str = "collectives", **options: Any) -> str:
    return json.dumps({"hardware": {"device": "cuda"}, "method": {"name": method, "exchange": exchange, **options}})


def cells_of(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Cell]:
    return cells(select([commit(rows, folder)]).rows)


def names(rows: Sequence[Mapping[str, Any]], folder: Path) -> set[str]:
    return {c.series for c in cells_of(rows, folder)}


# names


def test_copy_engines_are_always_said_and_collectives_never(tmp_path: Path) -> None:
    engines = row(**ULYSSES, config=config("ulysses", "copy_engines"))
    assert names([engines, row(**RING, config=config("ring"))], tmp_path) == {
        "ulysses by copy engines",
        "ring zigzag",
    }


def test_options_come_after_copy_engines_and_are_told_apart_over_both_transports(tmp_path: Path) -> None:
    rows = [
        row(**ULYSSES, kernel="flash_attn", head_chunks=1, config=config("ulysses", head_chunks=1)),
        row(**ULYSSES, kernel="flash_attn_4", head_chunks=1, config=config("ulysses", head_chunks=1)),
        row(**ULYSSES, kernel="flash_attn_4", head_chunks=4, config=config("ulysses", "copy_engines", head_chunks=4)),
        row(**RING, kernel="flash_attn_4", config=config("ring")),
    ]
    assert names(rows, tmp_path) == {
        "ulysses flash_attn",
        "ulysses flash_attn_4",
        "ulysses by copy engines flash_attn_4 head_chunks=4",
        "ring zigzag flash_attn_4",
    }


def test_a_message_alone_says_copy_engines_once(tmp_path: Path) -> None:
    rows = [collective("nvlink", "all_to_all by copy engines", 300, config=config("ulysses", "copy_engines"))]
    assert names(rows, tmp_path) == {"all_to_all by copy engines"}


# what is drawn


def test_attention_is_drawn_in_flops_a_device_and_training_in_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = drawn(monkeypatch)
    build([commit([row(attention_flops_per_s=8e12, **RING), row(workload="train_step", pass_kind="step")], tmp_path)])
    labels = {str(axes.get_xlabel()) for figure in figures for axes in figure.axes}
    assert {"attention TFLOP/s/rank", "tokens/s/rank"} <= labels
    (cell,) = [c for c in cells(select([tmp_path]).rows) if c.asked["workload"] == "attention"]
    assert cell.median_step_ms is not None
    assert cell.attention_tflops(cell.median_step_ms) == pytest.approx(8 / 4)
    page = (tmp_path / "_work/report/index.html").read_text()
    assert "attention TFLOP/s/rank" in page
    assert "<td>2.00</td>" in page


def test_settings_on_several_fabrics_are_drawn_on_the_fastest_alone(tmp_path: Path) -> None:
    rows = [row(fabric=f, **m) for f in ("nvlink", "shm") for m in (RING, ULYSSES)]
    speeds = {"nvlink": 300, "shm": 20}
    for fabric, speed in speeds.items():
        rows += [collective(fabric, p, speed, sp_size=4) for p in ("all_to_all", "send_recv")]
    found = cells_of(rows, tmp_path)
    assert {c.asked["fabric"] for c in foremost(found, places(found)) if c.ok and c.asked["seq_len"]} == {"nvlink"}
    drawings, words = draw(found)
    assert {d.setting.split(", ")[-2] for d in drawings} == {"nvlink"}
    assert words == ["Of settings on several fabrics the fastest is drawn; shm are under Fabrics and in the tables."]


def test_many_series_at_two_lengths_are_dots_and_few_are_lines(tmp_path: Path) -> None:
    two = [row(seq_len=n, kernel=f"k{k}", **RING) for n in (1024, 4096) for k in range(5)]
    found = cells_of(two, tmp_path)
    assert is_dots(found)
    assert not is_dots([c for c in found if c.series.endswith(("k0", "k1"))])


def test_an_axis_begins_above_zero_only_for_values_within_a_factor_of_two() -> None:
    assert is_close([500.0, 560.0])
    assert not is_close([200.0, 560.0])
    assert not is_close([])


# nothing is cut off


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved from now on."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **how: Any) -> None:
        figures.append(figure)
        save(figure, *args, **how)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def long_names() -> list[dict[str, Any]]:
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "attention_flops_per_s": 1e12}
    arms = {"compute_only_step_ms": [8.0], "comm_only_step_ms": [3.0], "exposed_comm_ms": 2.0}
    made = []
    for fabric in ("nvlink", "shm"):
        for lengths in (1024, 2048, 4096):
            for dtype in ("input", "float32"):
                options = {"dkv_dtype": dtype, "config": config("ring", "copy_engines", merge_dtype=dtype)}
                transport = RING | {"primitive": "send_recv by copy engines"}
                made.append(row(seq_len=lengths, fabric=fabric, **transport, **options, **shape, **arms))
            theirs = ULYSSES | {"method": "theirs", "primitive": "all_to_all", "implementation": LONG}
            made.append(row(seq_len=lengths, fabric=fabric, **theirs, **shape, config=config("theirs")))
            made.append(row(seq_len=lengths, fabric=fabric, **ULYSSES, **shape, config=config("ulysses")))
        for primitive in ("send_recv by copy engines", "all_to_all"):
            made.append(collective(fabric, primitive, 300 if fabric == "nvlink" else 20, sp_size=4))
    made.append(row(status="oom", seq_len=8192, fabric="nvlink", **ULYSSES, num_heads=32, num_kv_heads=8, head_dim=128))
    return made


def test_no_legend_or_name_is_cut_off_however_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn(monkeypatch)
    out = build([commit(long_names(), tmp_path)]).page.parent
    kinds = {path.name.partition("-")[0] for path in out.glob("*.png")}
    assert kinds == {"throughput", "memory", "communication", "attribution", "fabrics", "errors"}
    for figure in figures:
        figure.set_dpi(DPI)  # texts are a little narrower at the resolution that the layout was made for
        renderer = FigureCanvasAgg(figure).get_renderer()
        boxes = [legend.get_window_extent(renderer) for legend in figure.legends]
        boxes += [t.get_window_extent(renderer) for axes in figure.axes for t in axes.get_yticklabels() if t.get_text()]
        assert boxes
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)
        assert all(axes.get_window_extent(renderer).width > 100 for axes in figure.axes)


def test_a_legend_has_fewer_columns_for_longer_names_and_then_widens_the_figure() -> None:
    assert columns_within(["ring", "ulysses"], 5.2, 2) == (2, 5.2)
    assert columns_within(["ring", "x" * 60], 5.2, 2) == (1, 5.2)
    columns, width = columns_within(["x" * 120], 5.2, 2)
    assert columns == 1
    assert width > 8
