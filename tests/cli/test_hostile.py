"""Words and folders that could do harm, given to the real console: one line, exit code 2, nothing made on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sp_bench.planning import overrides
from sp_bench.rows import store

from .console import console, refusal

LONG = "a" * 10240
THREE = ("method=ulysses", "sp_size=3")  # is refused without a launch, should a word pass unseen

WORDS = [
    ("method._target_=os.system", "no _target_"),
    ("+hydra.launcher._target_=os.system", "keys cannot be added"),
    ("hydra.launcher._target_=os.system", "Hydra's own settings are fixed"),
    ("hydra/launcher=basic", "Hydra's own groups are fixed"),
    ("hydra.searchpath=[file:///tmp]", "Hydra's own settings are fixed"),
    ("hydra.callbacks.x._target_=hydra.experimental.callbacks.PickleJobInfoCallback", "Hydra's own settings are fixed"),
    ("campaign=../../x", "campaign='../../x': use letters"),
    ("campaign=/tmp/x", "campaign='/tmp/x': use letters"),
    ("campaign=-x", "campaign='-x': use letters"),
    ("campaign=.x", "campaign='.x': use letters"),
    ("campaign=_work", "campaign='_work': use letters"),
    ("campaign=a\nb", r"campaign=a\nb"),
    ("campaign='a\nb'", r"campaign='a\nb': use letters"),
    ("campaign=\x1b[2J", r"campaign=\x1b[2J"),
    (f"campaign={LONG}", "at most 100"),
    ("campaign=${oc.env:HOME}", "no interpolation"),
    (f"{LONG}=1", "(10,240 characters) is not a field"),
    (f"method={LONG}", "method is one of"),
    (f"seq_len={LONG}", "must be a whole number"),
    ("seq_len=99999999999999999999", "does not fit into 64 bits"),
    ("model.rope_theta=nan", "model.rope_theta=nan must be a finite number"),
    ("model.rope_scaling=yarn", "needs model.rope_factor, model.rope_original_seq_len too, as in llama3_1_8b"),
    ("model.norm_eps=inf", "model.norm_eps=inf must be a finite number"),
    ("deadlines.init=inf", "deadlines.init=inf must be a finite number"),
    ("model.num_heads=1000000000001", "model.num_heads=1000000000001 is more than 65536"),
    ("sp_size=1000000000", "sp_size=1000000000 is more than 65536"),
    ("replicates=1000000000", "replicates=1000000000 of 1 cells are 1,000,000,000 trials, more than 100,000"),
    ("results_root=''", "results_root='' is empty"),
    ("results_root=-x", "begins with '-'"),
    ("results_root='~/x'", "begins with '~'"),
    ("results_root='a\nb'", "cannot be printed"),
    (f"results_root={LONG}", "longer than file systems allow"),
    ("results_root=${oc.env:HOME}", "no interpolation"),
    ("results_root=null", "must be text"),
    ("sweep=../smoke", "sweep is one of"),
    ("--config-dir=/nowhere", "--config-dir /nowhere is no folder"),
    ("--config-path=/tmp", "is not a flag of run"),
    ("--experimental-rerun=config.pickle", "is not a flag of run"),
    ("-cd", "is not a flag of run"),
    ("", "expected key=value"),
]


@pytest.mark.parametrize(("word", "message"), WORDS, ids=[str(i) for i in range(len(WORDS))])
def test_a_hostile_word_is_one_line_and_makes_nothing(tmp_path, monkeypatch, capfd, word, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capfd, "run", *overrides.replaced(THREE, [word]))
    assert list(tmp_path.iterdir()) == []


def test_variables_of_hydra_change_nothing(tmp_path):
    hostile = {
        "HYDRA_FULL_ERROR": "0",
        "HYDRA_MAIN_MODULE": "../../x",
        "HYDRA_INSTANTIATE_ALLOWLIST_OVERRIDE": "os.system",
        "HYDRA_DEPRECATION_WARNINGS_AS_ERRORS": "1",
    }
    plans = [
        subprocess.run(
            [sys.executable, "-m", "sp_bench", "plan", *THREE],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | more,
        )
        for more in ({}, hostile)
    ]
    assert plans[0].returncode == 0, plans[0].stderr
    assert (plans[0].stdout, plans[0].stderr) == (plans[1].stdout, plans[1].stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["run", "plan", "status", "report"])
@pytest.mark.parametrize("link", ["campaign", "work", "trials"])
def test_a_campaign_that_is_a_link_to_elsewhere_is_refused(tmp_path, monkeypatch, capfd, verb, link):
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = {
        "campaign": Path("results/c"),
        "work": Path("results/c", store.WORK),
        "trials": Path("results/c", store.WORK, "trials"),
    }[link]
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    words = ("results/c",) if verb in ("status", "report") else (*THREE, "campaign=c")
    assert f"{path} is a link that leads out of {path.parents[0] if link == 'campaign' else 'results/c'}" in refusal(
        capfd, verb, *words
    )
    assert list(elsewhere.iterdir()) == []


def test_a_campaign_that_is_a_link_within_the_results_is_followed(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "night"
    folder.mkdir(parents=True)
    (folder / store.RowName("a" * 12, "b" * 8, 0, "ok").file_name).touch()
    (tmp_path / "results" / "latest").symlink_to("night")
    code, out, err = console(capfd, "status", "results/latest")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split() == ["latest", "1", *"000000", "1"]


def test_status_names_what_is_no_row_and_takes_no_name_for_markup(tmp_path, capfd):
    folder = tmp_path / "[red]x[bold]\n\udcff"
    folder.mkdir()
    (folder / store.RowName("a" * 12, "b" * 8, 0, "ok").file_name).touch()
    (folder / "notes\x1b[2J.txt").touch()
    (folder / f"{'c' * 12}-{'b' * 8}-0-ok.parquet").symlink_to("/etc/passwd")
    (folder / f"{'d' * 12}-{'b' * 8}-0-ok.parquet").mkdir()
    code, out, err = console(capfd, "status", str(folder))
    assert (code, err) == (0, "")
    _, counts, *named = out.splitlines()
    assert counts.split() == [r"[red]x[bold]\n\udcff", "1", *"000000", "1"]
    assert named == [
        f"{'c' * 12}-{'b' * 8}-0-ok.parquet: a link that leads out of the results; skipped",
        f"{'d' * 12}-{'b' * 8}-0-ok.parquet: not a file; skipped",
        r"notes\x1b[2J.txt: not a row (its name has another form); skipped",
        f"{'a' * 12}-{'b' * 8}-0-ok.parquet: Parquet file size is 0 bytes; skipped",
    ]


@pytest.mark.parametrize("name", [LONG, "no\nwhere", "no\udcffwhere", "--", "[/x]"])
def test_a_folder_that_no_disk_has_is_one_line(capfd, name):
    assert " of results" in (line := refusal(capfd, "status", "--", name)) or "cannot be read" in line


def test_a_report_to_a_name_that_no_disk_takes_is_one_line(tmp_path, capfd):
    assert "File name too long" in refusal(capfd, "report", str(tmp_path), "--out", LONG)


PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04", b"\x93NUMPY")


def test_a_finished_campaign_has_no_file_that_executes_when_it_is_read(finished):
    folder, _, _ = finished
    files = [path for path in (folder / "results").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert path.suffix not in {".pkl", ".pickle", ".pt", ".pth", ".npy", ".npz", ".joblib", ".db"}, path
        assert not path.read_bytes().startswith(PICKLES), path


def test_a_finished_campaign_holds_no_link_that_leads_out(finished):
    folder, _, _ = finished
    assert not [path for path in (folder / "results").rglob("*") if path.is_symlink()]
