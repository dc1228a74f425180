"""seq_len=max through the real command line: a kernel that runs out of memory above a length, on the CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sp_bench import hardware
from sp_bench.rows import plans, store
from sp_bench.testing import faults

from .console import console, refusal

TINY = ("method=ulysses", "sp_size=1", "model.num_heads=2", "model.num_kv_heads=2", "workload.correctness_seq_len=64")
SHORT = (
    "workload.warmup_steps=0",
    "workload.timed_steps=1",
    "search.resolution=0.1",
    "search.longest=9000",
    "campaign=edge",
)
MAX = (*TINY, *SHORT, "seq_len=max")
NEAR = (*MAX, "search.start=2800")  # the edge, which saves probes
FAULT = {faults.VARIABLE: "torch_oom_above_3000_tokens:all:init"}


def says(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sp_bench", *words]
    return subprocess.run(command, cwd=folder, env=os.environ | FAULT, capture_output=True, text=True)


def lengths(folder: Path) -> dict[tuple[int, int], str]:
    rows = store.read(folder / "results" / "edge", ("seq_len", "replicate", "status"))[0].to_pylist()
    return {(row["seq_len"], row["replicate"]): row["status"] for row in rows}


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> tuple[Path, str, str, dict[tuple[int, int], str]]:
    """A folder in which a search was interrupted and then resumed to its end; what the two runs printed, and the rows
    between them."""
    folder = tmp_path_factory.mktemp("searched")
    command = [sys.executable, "-m", "sp_bench", "run", *NEAR, "--no-report"]
    # a test run in the background of a shell ignores interrupts, and its children would inherit that
    listen = lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None  # noqa: E731
    environment = os.environ | FAULT
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=listen
    ) as run:
        campaign = folder / "results" / "edge"
        while not campaign.is_dir() or len(list(store.committed(campaign))) < 2:
            assert run.poll() is None
            time.sleep(0.02)
        # what SIGKILL would leave at this moment
        (plan,) = plans.read(campaign)
        assert {row.trial_id for row in store.committed(campaign)} <= plan.probes
        killed = says(folder, "status", "results/edge").stdout
        assert re.search(r"not ended: search ulysses .*: \[[\d,]+ tokens fit, ", killed)
        run.send_signal(signal.SIGINT)
        interrupted = run.communicate()[0]
    assert "not ended: search ulysses" in says(folder, "status", "results/edge").stdout
    before = lengths(folder)
    resumed = says(folder, "resume", *NEAR, "--no-report")
    assert resumed.returncode == 0, resumed.stderr
    return folder, interrupted, resumed.stdout, before


def test_an_interrupted_search_goes_on_where_it_stopped(searched, monkeypatch, capfd):
    folder, interrupted, resumed, before = searched
    assert "1 of 1 searches did not end; the words of this run go on with them" in interrupted
    assert "longest: " in resumed
    assert before.items() <= lengths(folder).items()
    monkeypatch.chdir(folder)
    assert "not ended" not in console(capfd, "status", "results/edge")[1]


def test_the_search_leaves_ordinary_rows_and_says_between_which_lengths_the_edge_is(searched, monkeypatch, capfd):
    folder, _, resumed, _ = searched
    monkeypatch.chdir(folder)
    (said,) = [line for line in resumed.splitlines() if line.startswith("longest: ")]
    found = lengths(folder)
    fits = max(length for (length, _), status in found.items() if status == "ok")
    fails = min(length for (length, _), status in found.items() if status == "oom")
    assert said.endswith(f"[{fits:,} tokens fit, {fails:,} do not]")
    assert fits <= faults.OOM_ABOVE < fails <= 1.1 * fits
    assert {(fits, 1), (fails, 1)} <= found.keys()
    code, again, _ = console(capfd, "run", *NEAR, "--no-report")
    assert (code, said in again) == (0, True)
    assert lengths(folder) == found
    finer = [word for word in NEAR if not word.startswith("search.resolution")] + ["search.resolution=0.02"]
    finer = says(folder, "run", *finer, "search.max_probes=1", "--no-report")
    assert f"from {len(found)} rows here: [{fits:,} tokens fit, {fails:,} do not]" in finer.stdout
    assert "about 1 of at most 1 probes left" in finer.stdout
    ((more, _),) = lengths(folder).keys() - found.keys()
    probes = {trial_id for plan in plans.read(folder / "results" / "edge") for trial_id in plan.probes}
    assert probes == {row.trial_id for row in store.committed(folder / "results" / "edge")}
    assert fits < more < fails
    fits, fails = (more, fails) if lengths(folder)[more, 0] == "ok" else (fits, more)
    assert console(capfd, "report", "results/edge")[0] == 0
    text = (folder / "results" / "edge" / store.WORK / "report" / "index.html").read_text()
    assert f"{fails:,} tokens ({fits:,} ran)" in text


def test_the_plan_says_where_a_search_starts_and_starts_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    said = json.loads(console(capfd, "plan", *MAX, "search.start=2000", "--json")[1])
    assert said["trials"] == []
    assert any("seq_len=max" in note and "from 1,984 tokens, about 5 probes" in note for note in said["notes"])
    assert not (tmp_path / "results").exists()


def test_a_plan_without_gpus_starts_where_those_of_the_plan_end_and_says_what_it_counts_on(monkeypatch, capfd):
    monkeypatch.setattr(hardware, "gpus", lambda: None)
    words = ("sweep=h200x1_longest", "workload.checkpoint_offload=true", "workload.mlp_tile_tokens=null", "sp_size=1")
    found = re.search(
        r"from ([\d,]+) tokens on GPUs of ([\d.]+) GiB and hosts that hold (\d+) GiB", told(capfd, *words)
    )
    assert found is not None
    assert found[2] == "139.8"
    capped = told(capfd, *words, "hardware.device_memory_gib=79.6", "engine.optimizer_offload=null")
    less = re.search(r"from ([\d,]+) tokens on GPUs of 79.6 GiB and hosts that hold (\d+) GiB", capped)
    assert less is not None
    assert int(less[1].replace(",", "")) < int(found[1].replace(",", ""))
    assert int(less[2]) < int(found[3])
    assert "since the memory of a100 is not known: give hardware.device_memory_gib" in told(
        capfd, *words, "hardware=a100"
    )


def told(capfd, *words: str) -> str:
    code, out, err = console(capfd, "plan", *words)
    assert code == 0, err
    return out


def test_the_plan_says_how_long_a_pack_may_be(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    pack = ("workload.packing=fixed", "workload.document_len=4096", "kernel=math")
    words = (*(word for word in MAX if not word.startswith("search.longest")), *pack)
    said = console(capfd, "plan", *words, "search.longest=134217728")[1]
    assert (
        "from 8,192 tokens, about 5 probes if they fit; up to 4,194,304 tokens, since a pack has at most 1,024 " in said
    )
    shorter = refusal(capfd, "plan", *words, "search.longest=8000")
    assert (
        "seq_len=max tries 8,000 tokens at most, and a search of such trials 8,192 or more; use a larger "
        "search.longest, or a smaller workload.document_len" in shorter
    )


def test_where_the_host_holds_no_length_a_search_says_what_the_shortest_needs_and_the_others_go_on(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "host_bytes", lambda: 64 * 2**30)
    words = (*SHORT, "workload=train_step", "method=ulysses,ring", "sp_size=2", "model=qwen3_8b", "seq_len=max")
    needs = r"GiB of host memory; this machine has 64\.0 GiB"
    code, said, _ = console(capfd, "plan", *words)
    assert code == 0
    assert len(re.findall(rf"from \d+ tokens, which end it as unsupported: .* take [\d.]+ {needs}", said)) == 2
    code, said, _ = console(capfd, "run", *words, "--no-report")
    assert code == 1  # nothing can run here
    ends = re.findall(rf"^longest: .*; \d+ tokens ended as unsupported: .* take [\d.]+ {needs}", said, re.MULTILINE)
    assert len(ends) == 2
    rows = store.read(tmp_path / "results" / "edge", ("method", "seq_len", "status"))[0].to_pylist()
    found = sorted((row["method"], row["seq_len"], row["status"]) for row in rows)
    assert found == [("ring", 256, "unsupported"), ("ulysses", 256, "unsupported")]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("workload=collective", "method=ring"), "workload=collective has no seq_len"),
        (("search.resolution=0",), "search.resolution=0.0 must be positive"),
        (("search.start=-1",), "search.start=-1 must be positive"),
        (("search.longest=null",), "would end only where the host's memory does: give search.longest"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(tmp_path, monkeypatch, capfd, words, reason):
    monkeypatch.chdir(tmp_path)
    kept = [word for word in MAX if word.partition("=")[0] not in {w.partition("=")[0] for w in words}]
    if "workload=collective" in words:
        kept = ["seq_len=max", "campaign=edge"]
    assert reason in refusal(capfd, "run", *kept, *words)
