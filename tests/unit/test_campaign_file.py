"""`_campaign.yaml`: runs append to it, people edit it, and a broken one stops nothing."""

import os
import time
from pathlib import Path

import pytest

from sp_bench.config.parsing import ConfigError
from sp_bench.driver.claims import COMMAND, Claims
from sp_bench.driver.command_record import record
from sp_bench.rows import campaign_file
from sp_bench.rows.campaign_file import NAME, CampaignFile, Command
from sp_bench.rows.store import WORK


@pytest.fixture
def folder(tmp_path):
    (tmp_path / WORK).mkdir()
    return tmp_path


BY_HAND = """# kept
machine: "a quiet one"  # kept, too
remarks: |
  Two lines
  - of which one looks like a list
commands:
  - words: sp-bench run sweep=smoke
    at: 2026-01-31T12:00:00Z  # a time for YAML
"""


def test_runs_append_and_what_people_wrote_stays(folder):
    (folder / NAME).write_text(BY_HAND)
    campaign_file.append(folder, "sp-bench run method=ring", "c" * 40)
    campaign_file.append(folder, "sp-bench resume method=ring", None)
    assert (folder / NAME).read_text().startswith(BY_HAND)
    found = campaign_file.read(folder)
    assert (found.machine, found.remarks) == ("a quiet one", "Two lines\n- of which one looks like a list")
    assert found.commands[0] == Command("sp-bench run sweep=smoke", "2026-01-31T12:00:00Z")
    assert [each.words for each in found.commands[1:]] == ["sp-bench run method=ring", "sp-bench resume method=ring"]
    assert found.commands[1].commit == "c" * 40
    assert time.strptime(found.commands[1].at, campaign_file.TIME)


def test_equal_words_of_equal_code_are_there_once(folder):
    for commit in ("a" * 40, "a" * 40, "b" * 40):
        campaign_file.append(folder, "sp-bench run", commit)
    assert [each.commit[0] for each in campaign_file.read(folder).commands] == ["a", "b"]
    assert os.listdir(folder / WORK) == []


@pytest.mark.parametrize(
    "text",
    [
        "commands:\n- words: x\nmachine: after it\n",
        "commands: [{words: x}]\n",
        "commands:\n- words: [x\n",
        "remarks: no\nand: what\n",
    ],
)
def test_a_file_that_cannot_be_appended_to_stays_as_it_is(folder, text):
    (folder / NAME).write_text(text)
    with pytest.raises(ConfigError):
        campaign_file.append(folder, "sp-bench run", None)
    assert (folder / NAME).read_text() == text


def broken(path, how):
    match how:
        case "pipe":
            os.mkfifo(path)
        case "link":
            (path.parent / "elsewhere").write_text("machine: x\n")
            path.symlink_to(path.parent / "elsewhere")
        case "folder":
            path.mkdir()
        case bytes():
            path.write_bytes(how)
        case str():
            path.write_text(how)


ALIASES = "a: &a [x]\n" + "".join(f"{b}: &{b} [{f'*{a},' * 9}]\n" for a, b in zip("abcdef", "bcdefg", strict=True))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("pipe", "not a plain file"),
        ("link", "not a plain file"),
        ("folder", "not a plain file"),
        ("machine: [", "line 1, is not YAML"),
        ("- a list\n", "_campaign.yaml must map names to texts"),
        ("machine: 7\n", "machine must be text"),
        ("comands: []\n", "comands is not a key; did you mean commands"),
        ("commands: words\n", "commands must be a list"),
        ("commands: [x]\n", r"commands\[0\] must map"),
        ("machine: !!python/object/apply:os.system [x]\n", "could not determine a constructor"),
        ("machine: 2026-99-99\n", "month must be in"),
        ("machine: " + "[" * 100_000, "nested deeper than"),
        (ALIASES, "more than 100,000 values"),
        ("x" * 10_000_000, "10,000,000 bytes; at most"),
        (b"machine: \xff\n", "not UTF-8"),
        (b"machine: \x00\n", "unacceptable character"),
    ],
)
def test_a_broken_file_is_named_at_once_and_passed_over(folder, how, why):
    broken(folder / NAME, how)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=why):
        campaign_file.read(folder)
    found, problems = campaign_file.read_all([folder])
    assert time.monotonic() - begun < 2
    assert found == [CampaignFile()]
    assert [line.startswith(str(folder / NAME)) for line in problems] == [True]


def test_no_file_says_nothing(tmp_path):
    assert campaign_file.read_all([tmp_path]) == ([CampaignFile()], [])


def test_recorded_words_have_no_absolute_path_and_no_place_of_results():
    words = [
        "method.path=/home/me/my method.py",
        "results_root=/data/me",
        "sweep=smoke",
        "resume=true",
        "a=[/x/b,~me/c]",
    ]
    told = campaign_file.command("run", words, ["/home/me/conf"])
    assert told == "sp-bench run 'method.path=.../my method.py' sweep=smoke 'a=[.../b,.../c]' --config-dir .../conf"
    assert (
        campaign_file.command("run", ["a=\x1b[31m", "b=1/2", "c=x/y.py"]) == r"sp-bench run 'a=\x1b[31m' b=1/2 c=x/y.py"
    )


def test_two_runs_at_once_lose_no_words(folder):
    children = []
    for child in range(4):
        if (pid := os.fork()) == 0:
            with Claims(folder / WORK / "claims") as claims:
                lost = [
                    line for n in range(5) for line in record(claims, folder, f"sp-bench run seed={child}{n}", None)
                ]
            os._exit(len(lost))
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert len({each.words for each in campaign_file.read(folder).commands}) == 20


def test_a_run_that_cannot_record_its_words_says_so(folder, monkeypatch):
    monkeypatch.setattr("sp_bench.driver.command_record.WAIT_S", 0)
    (folder / NAME).mkdir()
    with Claims(folder / WORK / "claims") as claims:
        assert "not a plain file; the words of this run are not in it" in "".join(record(claims, folder, "run", None))
        claims.take(COMMAND, lambda: False)
        assert "another run holds it" in "".join(record(claims, folder, "run", None))


def test_a_folder_of_configs_whose_path_is_not_recorded_is_given_to_what_continues(folder):
    words = campaign_file.command("run", ["model=mine", "seq_len=64"], [Path("/home/somebody/conf")])
    campaign_file.append(folder, words, None)
    with pytest.raises(ConfigError, match="has no whole path; give --config-dir"):
        campaign_file.to_continue(folder)
    given = [folder / "conf"]
    assert campaign_file.to_continue(folder, given) == [(["model=mine", "seq_len=64"], given)]
