"""The table and the figure of the longest sequence that fits."""

from pathlib import Path

from sp_bench.report import read, settings
from sp_bench.report.findings import findings
from sp_bench.report.longest import longest


def test_where_memory_runs_out_each_line_names_the_options_that_move_the_edge():
    """Titles of settings leave out what comes along with an engine: its kernel, its tiles, its compiled layers."""
    folders = [Path(__file__).parents[2] / "results" / name for name in ("h200x2_longest", "h200x2_theirs")]
    found = longest(settings(read(folders)))
    assert found is not None
    ours, theirs = ([name for name in found.names if (": fsdp2" in name) == own] for own in (True, False))
    assert len(ours) == 5
    assert all("compiled, loss_tile_tokens=2048, mlp_tile_tokens=4096" in name and "cuDNN" in name for name in ours)
    assert sum("allocator=expandable_segments" in name for name in ours) == 4
    assert len(theirs) == 2
    assert all(name.endswith("FlashAttention-2, eager") for name in theirs)


def test_findings_have_each_bracket_with_its_tries_and_no_line_where_nothing_ran_out():
    root = Path(__file__).parents[2] / "results"
    cells = read([root / "h200x2_longest", root / "h200x2_step_long"])
    told = findings(settings(cells), cells)
    (upipe,) = [line for line in told.splitlines() if line.startswith("| UPipe")]
    assert "| 425,984 | 442,368 | fit only, tries: 1 and 1, code 7681aa8 | h200x2_longest |" in upipe  # once refused
    assert sum("tries:" in line for line in told.splitlines()) == 5
