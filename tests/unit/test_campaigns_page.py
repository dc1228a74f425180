"""docs/CAMPAIGNS.md is what rows and `_campaign.yaml` say."""

from pathlib import Path

import pytest

from sp_bench.report import campaigns
from sp_bench.rows import git
from sp_bench.rows.campaign_file import NAME

from .rows import commit, row

ROOT = Path(__file__).parents[2]


def committed() -> list[Path]:
    """Folders of results but for those that the README's commands make, which git ignores."""
    found = (path for path in (ROOT / "results").iterdir() if path.is_dir())
    return sorted(path for path in found if path.name not in ("smoke", "default"))


def test_every_committed_campaign_says_what_its_rows_do_not():
    assert all((folder / NAME).is_file() for folder in committed())


ENVIRONMENT = row()["environment"]


def on(*uuids, name="NVIDIA H200"):
    return {**ENVIRONMENT, "device_names": [name] * len(uuids), "device_uuids": list(uuids), "cpu_cores": 8}


def page(tmp_path, rows, text=""):
    folder = commit(rows, tmp_path / "night")
    (folder / NAME).write_text(text)
    return campaigns.markdown([folder])


def test_a_line_has_command_commit_hardware_and_rows(tmp_path, monkeypatch):
    tree, changed = "tree:" + "b" * 40, "c" * 40 + "+tree:" + "d" * 40
    monkeypatch.setattr(git, "commits_of_trees", lambda git_shas: {tree: "e" * 40} if tree in set(git_shas) else {})
    rows = [
        row(replicate=1, git_sha="a" * 40, environment=on("GPU-0", "1")),
        row(replicate=2, git_sha=tree, git_dirty=None, environment=on("0", "1")),
        row(replicate=3, git_sha=changed, git_dirty=True, environment=on("7"), status="oom", reason="no memory"),
    ]
    text, problems = page(tmp_path, rows, "commands:\n- words: sp-bench run sweep=smoke\n- words: sp-bench run x=y\n")
    assert problems == []
    [line] = [line for line in text.splitlines() if line.startswith("| [`night`]")]
    parts = ["[`night`](#night)", "`sweep=smoke` and 1 more", "aaaaaaa, ccccccc with changes, eeeeeee, in the rows"]
    parts += ["2 x H200, machines 1, 2, 8 cores", "2 ok, 1 oom", ""]
    assert line == f"| {' | '.join(parts)} |"
    assert "1 of 1 x H200, 1 of 2 x H200" in text
    assert "\n    sp-bench run sweep=smoke\n    sp-bench run x=y\n" in text


def test_what_a_file_says_is_on_the_page_and_cannot_leave_its_section(tmp_path):
    said = "commit: 1234abc, by hand\ndiffers: with less\nsuperseded_by: day\nremarks: |\n  # Title\n\n"
    said += "  <script>x</script> [a](javascript:x) [b](METHODS.md) [c]\n\n  [c]: javascript:x\n"
    text, _ = page(tmp_path, [row()], said)
    assert "| 1234abc, by hand |" in text
    assert "superseded by `day`" in text
    assert "Differs from the sweep: with less." in text
    assert r"\# Title" in text
    assert "<script" not in text
    assert r"[a\](javascript:x) [b](METHODS.md)" in text
    assert r"[c\]: javascript" in text


def test_words_and_commits_are_no_markdown(tmp_path):
    words = "commit: '[a](javascript:x) <b>'\ncommands:\n- words: |\n    x`<i>|\n    <script>\n"
    text, _ = page(tmp_path, [row()], words)
    assert r"| `x'<i>\| <script>` | a(javascript:x) &lt;b> |" in text
    assert "\n    x`<i>| <script>\n" in text, "an indented block is shown as it is"


def test_a_broken_file_is_named_and_its_rows_are_listed(tmp_path):
    text, problems = page(tmp_path, [row()], "machine: [")
    assert "| 1 ok |" in text
    assert [NAME in line for line in problems] == [True]


@pytest.mark.parametrize("environment", [None, on()])
def test_rows_without_devices_are_listed(tmp_path, environment):
    text, _ = page(tmp_path, [row(environment=environment)])
    assert "| 1 ok |" in text
    assert "machine" not in text.partition("| `night`")[2]
