import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sp_bench import hardware, kernels, methods
from sp_bench.look import health, methods_table
from sp_bench.rows import campaign_file, store

from ..unit.rows import ENVIRONMENT, commit, row
from .console import console, refusal


@pytest.mark.parametrize(
    "verb", ["run", "resume", "submit", "plan", "report", "compare", "status", "show", "rm", "doctor", "methods"]
)
def test_the_help_of_each_verb_teaches_by_example(capfd, verb):
    code, printed, _ = console(capfd, verb, "--help")
    assert code == 0
    assert f"sp-bench {verb}" in printed.partition("Usage:")[2].partition("\n")[2]


def test_the_console_script_and_the_module_are_the_same():
    script = shutil.which("sp-bench", path=str(sys.prefix) + "/bin")
    assert script is not None
    commands = [script], [sys.executable, "-m", "sp_bench"]
    first, second = (subprocess.run([*each, "--version"], capture_output=True, text=True) for each in commands)
    assert first.stdout == second.stdout != ""


def test_status_counts_rows_from_their_names_and_names_those_that_cannot_be_read(capfd, tmp_path):
    folder = tmp_path / "night"
    folder.mkdir()
    for digit, attempt, status in (("a", 0, "oom"), ("a", 1, "ok"), ("b", 0, "unsupported"), ("c", 0, "ok")):
        (folder / store.RowName(digit * 12, "01234567", attempt, status).file_name).touch()
    code, printed, errors = console(capfd, "status", str(folder))
    assert code == 0, errors
    heading, line, *skipped = printed.splitlines()
    assert [each.rpartition("; ")[2] for each in skipped] == ["skipped"] * 4
    counts = dict(zip(heading.split(), line.split(), strict=True))
    assert (counts["env_ids"], counts["ok"], counts["oom"], counts["unsupported"]) == ("1", "2", "0", "1")


def kernel_ms(*attention_ms: float) -> list[dict[str, float]]:
    """`kernel_ms` of ranks whose attention takes so long."""
    parts = (
        "messages",
        "host_copies",
        "attention",
        "matmul",
        "other",
        "exposed_messages",
        "exposed_host_copies",
        "idle",
    )
    return [dict.fromkeys(parts, 0.0) | {"attention": ms} for ms in attention_ms]


@pytest.mark.parametrize("slow_rows", [3, 1])
def test_a_gpu_that_is_slow_in_most_rows_is_named_with_its_host_by_status_compare_and_report(
    capfd, tmp_path, slow_rows
):
    on = {"hostname": "node7", "device_names": ["NVIDIA H200"] * 2, "device_uuids": ["GPU-aaaaaaaaaa", "bbbbbbbbbb"]}
    for name in ("a", "b"):
        rows = [
            row(
                replicate=replicate,
                layout="zigzag",
                hardware="h200",
                environment=ENVIRONMENT | on,
                kernel_ms=kernel_ms(100.0, 125.0 if replicate < slow_rows else 101.0),
            )
            for replicate in range(3)
        ]
        commit(rows, tmp_path / name)
    folders = [str(tmp_path / name) for name in ("a", "b")]
    code, status, errors = console(capfd, "status", folders[0])
    assert code == 0, errors
    _, compared, _ = console(capfd, "compare", *folders)
    console(capfd, "report", folders[0], "--out", str(tmp_path / "page"))
    page = (tmp_path / "page" / "index.html").read_text()
    words = "low GPU: GPU-bbbbbbbb of node7: its kernels take 1.25x as long as the median GPU"
    assert [words in text for text in (status, compared, page)] == [slow_rows == 3] * 3
    console(capfd, "report", folders[0], "--out", str(tmp_path / "page"), "--anonymous")
    assert "node7" not in (tmp_path / "page" / "index.html").read_text()


def test_status_says_what_the_campaigns_file_says(capfd, tmp_path):
    for name in ("a", "b"):
        commit([row()], tmp_path / name)
    said = (
        "superseded_by: b\nremarks: |\n  two\n  lines\ncommands:\n- words: sp-bench run\n  at: 2026-01-31T12:00:00Z\n"
    )
    (tmp_path / "a" / campaign_file.NAME).write_text(said)
    (tmp_path / "b" / campaign_file.NAME).write_text("remarks: [\n")
    _, printed, _ = console(capfd, "status", str(tmp_path / "a"))
    lines = ["remarks: two lines", "superseded by: b", "command: sp-bench run (2026-01-31T12:00:00Z)"]
    assert printed.splitlines()[2:] == [f"  a: {line}" for line in lines]
    _, printed, _ = console(capfd, "status", str(tmp_path / "a"), str(tmp_path / "b"))
    assert "  a: superseded by: b\n" in printed
    assert "remarks: two" not in printed
    assert f"{tmp_path / 'b' / campaign_file.NAME}, line 2, is not YAML: " in printed


def test_status_reads_a_pack(capfd, tmp_path):
    folder = commit([row(), row(seq_len=8192, status="oom", reason="out of memory")], tmp_path / "night")
    assert console(capfd, "pack", str(folder))[0] == 0
    code, printed, errors = console(capfd, "status", str(folder))
    assert code == 0, errors
    assert "out of memory" in printed


@pytest.mark.parametrize("verb", ["status", "report"])
def test_a_folder_that_is_not_there_is_named(capfd, verb):
    assert refusal(capfd, verb, "nowhere") == "sp-bench: nowhere is not a folder of results"


def test_a_report_says_which_folder_has_no_rows(capfd, tmp_path):
    (tmp_path / "empty").mkdir()
    message = refusal(capfd, "report", str(tmp_path / "empty"))
    assert message.endswith("empty: no rows, and so no report; name folders that a run wrote to")
    assert not any((tmp_path / "empty").iterdir())


def test_a_report_names_and_skips_what_is_not_a_row(finished, capfd, tmp_path):
    folder, _, _ = finished
    campaign = tmp_path / "small"
    shutil.copytree(folder / "results" / "small", campaign)
    (campaign / "notes.txt").write_text("mine")
    (campaign / f"{'0' * 12}-{'0' * 8}-0-ok.parquet").write_bytes(b"torn")
    code, printed, errors = console(capfd, "report", str(campaign), "--out", str(tmp_path / "page"))
    assert code == 0, errors
    assert "notes.txt" in printed
    assert "000000000000" in printed
    assert (tmp_path / "page" / "index.html").is_file()


def test_doctor_names_every_library_kernel_and_method(capfd):
    code, printed, errors = console(capfd, "doctor")
    assert code == 0, errors
    for name in (*kernels.NAMES, *methods.NAMES, "torch", "flash-attn", "gloo"):
        assert name in printed


DOCUMENT = Path(__file__).parents[2] / "docs" / "METHODS.md"


def test_the_support_matrix_of_the_docs_is_what_the_command_prints(capfd):
    _, printed, errors = console(capfd, "methods")
    assert errors == ""
    written = DOCUMENT.read_text().partition(methods_table.BEGIN)[2].partition(methods_table.END)[0]
    hint = "docs/METHODS.md is behind: sp-bench methods --write docs/METHODS.md"
    assert printed.startswith(written.strip() + "\n"), hint


def test_the_command_writes_the_matrix_between_its_markers_and_nothing_else(capfd, tmp_path):
    copy = tmp_path / "METHODS.md"
    copy.write_text(f"before\n{methods_table.BEGIN}old\n{methods_table.END}after\n")
    assert console(capfd, "methods", "--write", str(copy))[0] == 0
    text = copy.read_text()
    assert text.startswith(f"before\n{methods_table.BEGIN}\n| method ")
    assert text.endswith(f"\n\n{methods_table.END}after\n")
    assert "old" not in text


@pytest.mark.parametrize(("content", "why"), [("no markers", "has no line <!--"), (None, "cannot be rewritten")])
def test_a_file_without_the_markers_is_left_alone(capfd, tmp_path, content, why):
    if content:
        (tmp_path / "METHODS.md").write_text(content)
    code, _, errors = console(capfd, "methods", "--write", str(tmp_path / "METHODS.md"))
    assert (code, why in errors) == (2, True)
    assert content is None or (tmp_path / "METHODS.md").read_text() == content


TINY = ("workload.max_message_bytes=1048576", "workload.warmup_steps=1", "workload.timed_steps=3", "results_root=rows")


def test_doctor_measures_the_fabrics_of_this_machine_once(command, tmp_path, monkeypatch, capfd):
    words = ("doctor", "--curves", "fabric=gloo", "hardware=cpu", "sp_size=2", *TINY)
    first = command(*words)
    assert first.returncode == 0, first.stderr
    assert "3 ok" in first.stdout
    lines = [line.split() for line in first.stdout.splitlines() if line.startswith("gloo")]
    assert sorted(line[1] for line in lines) == ["all_gather", "all_to_all", "send_recv"]
    assert all(line[3] == "2" and line[-1] == "ok" for line in lines)
    assert len(list(store.committed(tmp_path / "rows" / "fabrics"))) == 3
    monkeypatch.chdir(tmp_path)
    code, again, errors = console(capfd, *words)
    assert code == 0, errors
    assert "3 committed before" in again
    assert [line.split() for line in again.splitlines() if line.startswith("gloo")] == lines


ON_CPUS = ("hardware=cpu", "fabric=gloo", "kernel=math", "sp_size=2", "seq_len=256")


def test_doctor_measures_each_device_and_each_pair_and_fails_where_one_is_named(capfd):
    code, printed, errors = console(capfd, "doctor", "--gpus", "--json", *ON_CPUS)
    found = json.loads(printed)
    assert code == (1 if found["wrong"] else 0), errors  # a busy machine may have a slow rank
    host = socket.gethostname()
    assert [device["name"] for device in found["devices"]] == [f"rank 0 of {host}", f"rank 1 of {host}"]
    assert all(device["products_flops_per_s"] > 0 for device in found["devices"])
    (pair,) = found["pair_bytes_per_s"]
    assert pair["devices"] == [f"rank 0 of {host}", f"rank 1 of {host}"]
    assert pair["bytes_per_s"] > 0


def test_doctor_names_the_device_whose_rank_fails(capfd):
    words = [each for each in ON_CPUS if not each.startswith("kernel")]
    code, printed, _ = console(capfd, "doctor", "--gpus", *words, "kernel=cudnn")
    assert code == 1
    assert "failed in attention: NotImplementedError: Could not run" in printed
    assert f" of {socket.gethostname()}: failed" in printed


def test_doctor_names_a_slow_device_and_ends_with_1(capfd, monkeypatch):
    devices = tuple(
        health.Device(f"GPU {i} of node7", rate, 5e14, {}, "node7") for i, rate in enumerate((7e14, 7e14, 5e14))
    )
    monkeypatch.setattr(health, "measure", lambda config, folder, say: health.Health("node7", devices))
    code, printed, _ = console(capfd, "doctor", "--gpus", *ON_CPUS)
    assert code == 1
    assert "slow or limited: GPU 2 of node7: 500 TFLOP/s, 29% below 700 in matrix products" in printed


@pytest.mark.skipif(hardware.gpus() is not None, reason="this machine has GPUs")
def test_doctor_says_that_there_is_no_gpu(capfd):
    assert refusal(capfd, "doctor", "--gpus") == "sp-bench: --gpus: no GPU here"


def test_plain_doctor_takes_no_overrides(capfd):
    line = refusal(capfd, "doctor", "sp_size=2")
    assert line == "sp-bench: sp_size=2: doctor takes --curves or --gpus, and overrides only with these"
