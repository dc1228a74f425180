"""What a CI job sees of the command."""

import json
from datetime import timedelta

import pytest

from sp_bench.formats import MISSING

from ..unit.rows import ENVIRONMENT, STARTED_AT, commit, row
from .console import console, refusal


@pytest.fixture
def before(tmp_path, monkeypatch):
    """Ring at two lengths in 6 replicates, in the folder that commands run in."""
    monkeypatch.chdir(tmp_path)
    return commit(campaign(1.0), tmp_path / "before")


def campaign(factor: float, **columns):
    """Step times `factor` times as long at 2048 tokens."""
    lengths = {1024: 1.0, 2048: factor}
    jitter = (1.0, 1.01, 0.99, 1.0, 1.02, 0.98)
    return [
        row(median_ms=10.0 * f * jitter[replicate], replicate=replicate, seq_len=seq_len, **columns)
        for seq_len, f in lengths.items()
        for replicate in range(6)
    ]


@pytest.mark.usefixtures("before")
def test_equal_campaigns_pass_and_what_is_no_row_is_named(capfd, tmp_path):
    (commit(campaign(1.0), tmp_path / "after") / "notes.txt").write_text("mine")
    code, printed, errors = console(capfd, "compare", "before", "after", "--fail-on", "median:5%")
    assert (code, errors) == (0, "")
    assert printed.count("1.000x [1.000, 1.000]") == 2
    assert "2 cells compared: 2 not told apart" in printed
    assert "notes.txt: not a row" in printed


@pytest.mark.usefixtures("before")
def test_a_slower_cell_exits_with_1_and_is_named(command, tmp_path):
    commit(campaign(1.2), tmp_path / "after")
    done = command("compare", "before", "after", "--fail-on", "median:5%")
    assert done.returncode == 1
    assert "1 slower, 1 not told apart" in done.stdout
    heading, line = done.stderr.splitlines()
    assert heading == "sp-bench: worse than --fail-on median:5% allows: 1 finding"
    assert line.startswith("  ring contiguous, sp_size 2, seq_len 2,048, attention forward_backward")
    assert line.endswith("1.20x [1.20, 1.20]")


@pytest.mark.usefixtures("before")
def test_rows_that_cannot_be_read_do_not_pass(capfd, tmp_path):
    cut = sorted(commit(campaign(1.0), tmp_path / "after").glob("*.parquet"))[0]
    cut.write_bytes(cut.read_bytes()[:100])
    code, printed, errors = console(capfd, "compare", "before", "after", "--fail-on", "median:5%")
    assert code == 1
    assert errors.splitlines()[1:] == [f"  after/{cut.name}: cannot be read"]
    assert f"after: {cut.name}: " in printed  # and why


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is not a folder of results"),
        (
            ["other"],
            "no cell is in both: the nearest two differ in method.name=ring against ulysses. --ignore method.name ",
        ),
        (["before", "--fail-on", "mean:5%"], "--fail-on mean:5%: use median:NUMBER%, such as median:5% or median:2.5%"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capfd, tmp_path, arguments, words):
    commit([row(method="ulysses")], tmp_path / "other")
    assert refusal(capfd, "compare", "before", *arguments).startswith(f"sp-bench: {words}")


@pytest.mark.usefixtures("before")
def test_several_campaigns_are_each_compared_with_the_first(capfd, tmp_path):
    commit(campaign(1.0), tmp_path / "after")
    commit(campaign(1.2), tmp_path / "later")
    code, printed, errors = console(capfd, "compare", "before", "after", "later", "--fail-on", "median:5%")
    assert code == 1
    assert printed.count("2 cells compared") == 2
    assert len(errors.splitlines()) == 2
    code, printed, _ = console(capfd, "compare", "before", "after", "later", "--json")
    assert [each["b"] for each in json.loads(printed)] == ["after", "later"]


def test_cells_may_differ_in_options_that_are_ignored(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, steps in (("before", 1), ("after", 2)):
        config = json.dumps({"method": {"name": "ring"}, "workload": {"warmup_steps": steps}})
        commit([row(config=config, warmup_steps=steps)], tmp_path / name)
    assert refusal(capfd, "compare", "before", "after").startswith(
        "sp-bench: no cell is in both: the nearest two differ in workload.warmup_steps=1 against 2. "
        "--ignore workload.warmup_steps pairs them. before has 1 cell ("
    )
    for option in ("workload.warmup_steps", "warmup_steps"):
        code, printed, _ = console(capfd, "compare", "before", "after", "--ignore", option)
        assert code == 0
        assert "1 cell compared" in printed
    told = refusal(capfd, "compare", "before", "after", "--ignore", "colour")
    assert told.startswith("sp-bench: --ignore colour: no option is called so; use one of batch_size, ")


@pytest.mark.usefixtures("before")
def test_tails_and_spreads_are_told(capfd):
    _, printed, _ = console(capfd, "compare", "before", "before", "--json")
    pair = json.loads(printed)["pairs"][0]
    assert pair["a_p95_ms"] >= pair["a_ms"]
    assert pair["a_spread"] == pytest.approx(1.02 / 0.98 - 1)
    _, printed, _ = console(capfd, "compare", "before", "before")
    assert "B p95" in printed
    assert "Replicates of a cell lie up to 4.1% apart." in printed


def test_the_history_of_a_cell_has_a_line_a_campaign_by_time_with_its_ratio_to_the_one_before(capfd, tmp_path):
    machines = [ENVIRONMENT | {"device_names": ["NVIDIA H200"], "device_uuids": [uuid]} for uuid in "xxy"]
    days = [("monday", 10.0, "a" * 40), ("tuesday", 9.0, "b" * 40), ("wednesday", 9.9, "c" * 40)]
    for number, ((name, ms, sha), machine) in enumerate(zip(days, machines, strict=True)):
        started = STARTED_AT + timedelta(days=number)
        rows = [
            row(median_ms=ms, replicate=r, git_sha=sha, environment=machine, started_at=started + timedelta(minutes=r))
            for r in range(6)
        ]
        commit([*rows, row(method="ulysses", seq_len=512)] if name == "monday" else rows, tmp_path / name)
    folders = [str(tmp_path / name) for name in ("wednesday", "tuesday", "monday")]
    code, printed, errors = console(capfd, "report", *folders, "--history")
    assert code == 0, errors
    assert "ulysses" not in printed.lower()  # it ran in one of them
    first, second, third = (line.split() for line in printed.splitlines() if "day " in line)
    assert [first[0], first[3], first[-1]] == ["monday", "aaaaaaa", MISSING]
    assert [second[0], second[3], second[-1]] == ["tuesday", "bbbbbbb", "0.900x"]
    assert second[5] == "6"  # replicates
    assert third[-1] == "1.100x*"
    assert printed.splitlines()[-1].startswith("* of two machines, or of an unknown one")
    assert refusal(capfd, "report", *folders, "--history", "only.sp_size=64").endswith("never 64")


def test_a_history_of_one_campaign_says_that_there_is_none(capfd, tmp_path):
    commit([row()], tmp_path / "monday")
    _, printed, _ = console(capfd, "report", str(tmp_path / "monday"), "--history")
    assert printed.startswith("no cell ran in several of these campaigns")
