"""Figure 1 and Table 1 of a paper: chosen cells of several campaigns in one panel, by the author's names and order."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sp_bench.analysis.chosen import chosen
from sp_bench.config.parsing import ConfigError
from sp_bench.report import Look, Options, paper

from .rows import cells_of, commit
from .test_report import ULYSSES, on_gpus, replicated
from .test_report_one_rank import SPLITS, one

SIX = [1.0] * 6
OURS, RING = ("ours", {"method": ["ulysses"]}), ("the ring", {"method": ["ring"]})


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two campaigns of unequal code, a length each."""
    made = []
    for name, length, ratio in (("monday", 1024, 1.5), ("tuesday", 2048, 2.0)):
        rows = [*replicated(10.0, SIX, seq_len=length, **ULYSSES), *replicated(10.0 * ratio, SIX, seq_len=length)]
        made.append(commit([each | {"core_id": f"{length:08d}"} for each in rows], tmp_path / name))
    return made


def written(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / name).read_text().splitlines()))


@pytest.mark.parametrize(("venue", "column"), [("icml", 1), ("neurips", 2)])
def test_lines_join_campaigns_and_lose_no_point(folders: list[Path], tmp_path: Path, venue: str, column: int) -> None:
    out = tmp_path / "paper"
    paper.write(folders, out, [RING, OURS], Options(Look(column, None, venue)))
    table = written(out, "table1.csv")
    assert [(line["line"], line["seq_len"]) for line in table] == [
        (name, length) for length in ("1024", "2048") for name in ("the ring", "ours")
    ]
    assert [line["ratio_to_first"] for line in table] == ["", str(10 / 15), "", "0.5"]
    figure = written(out, "figure1.csv")
    assert len(figure) == 3 * 4
    assert {line["what"] for line in figure} == {"TFLOP/s a GPU", "peak GiB a GPU", "time over that of the ring"}
    assert "2 GPUs" in (out / "figure1.tex").read_text()
    environment = "table*" if column == 2 else "table"
    assert rf"\begin{{{environment}}}" in (out / "table1.tex").read_text()


def test_an_anonymous_one_names_no_campaign(folders: list[Path], tmp_path: Path) -> None:
    late = ("late", {"method": ["ring"], "campaign": ["tuesday"]})
    paper.write(folders, tmp_path / "paper", [OURS, late], Options(anonymous=True))
    assert [line["seq_len"] for line in written(tmp_path / "paper", "table1.csv") if line["line"] == "late"] == ["2048"]
    texts = [path.read_text() for path in (tmp_path / "paper").iterdir() if path.suffix in (".tex", ".csv", ".md")]
    assert not any(name in text for text in texts for name in ("monday", "tuesday"))


def test_what_cannot_be_one_line_is_refused_with_the_way_out(folders: list[Path]) -> None:
    cells = cells_of([on_gpus(**ULYSSES), on_gpus(kernel="flash_attn", **ULYSSES), on_gpus(sp_size=4), on_gpus()])
    for name, words, reason in (
        ("a", {"method": ["ulysses"]}, "2 cells at 1,024 tokens, which differ in kernel (cudnn, flash_attn); name one"),
        ("b", {"method": ["usp"]}, "method is ring, ulysses in these rows, never usp"),
        ("c", {"colour": [1]}, "colour is no option of these rows"),
        ("d", {"campaign": ["friday"]}, "campaign is made_up in these rows, never friday"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"--line {name}: {reason}")):
            chosen(cells, [(name, words)])
    over_gpus = chosen(cells, [RING])
    assert (over_gpus.over, over_gpus.places) == ("sp_size", [2, 4])
    longer = cells_of([on_gpus(sp_size=4), on_gpus(), on_gpus(seq_len=2048)])
    with pytest.raises(ConfigError, match="over seq_len and sp_size; name one value of either"):
        chosen(longer, [RING])


def test_a_line_says_where_it_ran_out_of_memory(tmp_path: Path) -> None:
    lost = on_gpus(seq_len=2048, status="oom", reason="out of memory", **ULYSSES)
    rows = [on_gpus(**ULYSSES), lost, *(on_gpus(seq_len=n) for n in (1024, 2048))]
    paper.write([commit(rows, tmp_path / "c")], tmp_path / "paper", [OURS, RING], Options())
    assert "out of memory" in (tmp_path / "paper" / "table1.md").read_text()


def recomputing(what: str, **columns: Any) -> dict[str, Any]:
    config = {"hardware": {"name": "h200", "device": "cuda"}}
    return on_gpus(config=json.dumps(config | {"workload": {"activation_checkpointing": what}}), **columns)


def test_captions_name_what_lines_differ_in_and_no_grade_is_of_unequal_kernels_or_recomputation(tmp_path: Path) -> None:
    step = {"workload": "train_step", "pass_kind": "step"}
    unequal = [
        recomputing("full", **ULYSSES, **step),
        recomputing("none", kernel="flash_attn", **step),
    ]
    paper.write([commit(unequal, tmp_path / "unequal")], tmp_path / "paper", [OURS, RING], Options())
    for name in ("table1.md", "figure1.tex"):
        text = " ".join((tmp_path / "paper" / name).read_text().replace("{}", "").split())
        assert (
            "ours: all recomputed, cuDNN, Ulysses; the ring: nothing recomputed, FlashAttention-2, contiguous ring."
            in text
        )
    (_, ring) = written(tmp_path / "paper", "table1.csv")
    assert ring["ratio_to_first"]
    assert ring["grade"] == ""
    assert "none, kernel, recomputation or offload differ" in (tmp_path / "paper" / "table1.md").read_text()


def test_captions_of_one_replicate_promise_no_interval_and_of_one_rank_no_grade(tmp_path: Path) -> None:
    paper.write([commit([one(**each) for each in SPLITS], tmp_path / "c")], tmp_path / "paper", [OURS, RING], Options())
    table = (tmp_path / "paper" / "table1.md").read_text()
    assert "One replicate each, so no intervals." in table
    assert "Grades: one_rank, messages are modelled." in table
