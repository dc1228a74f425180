"""`sp-bench project` and `advise`, over committed campaigns."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from sp_bench import api, hardware

from .console import console, refusal

RESULTS = Path(__file__).parents[2] / "results"
ROWS = [str(RESULTS / name) for name in ("h200x2_fabrics", "h200x2_train_step", "h200x4_fabrics", "h200x4_train_step")]


def test_advice_names_three_methods_both_ways_and_its_last_line_runs(capfd):
    code, out, _ = console(capfd, "advise", *ROWS, "--model", "qwen3_4b", "--gpus", "8", "--seq-len", "65536")
    lines = out.splitlines()
    assert code == 0
    begins = ["Use ", "Memory: ", "Step: ", "One sequence over 8 GPUs: ", "Sequences side by side: ", "Measure it "]
    assert [line[: len(begin)] for line, begin in zip(lines, begins, strict=True)] == begins
    for line in lines[3:5]:
        assert all(method in line for method in ("Ulysses", "ring", "all-gather")), line
    words = lines[-1].partition("sp-bench run ")[2].split()
    assert "hardware.allocator=expandable_segments" in words
    code, out, _ = console(capfd, "plan", *words)
    assert code == 0
    assert "qwen3_4b" in out
    assert "1 to run" in out or "needs 8 CUDA devices" in out


def test_without_campaigns_it_answers_from_what_the_version_was_released_with(capfd, tmp_path, monkeypatch):
    """Also where there is no checkout and no results/."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = console(capfd, "advise", "--model", "qwen3_4b", "--gpus", "4", "--seq-len", "65536")
    assert code == 0
    assert "one real rank of 4, messages as nvlink (h200x1_one_rank_held)" in out.splitlines()[2]
    assert re.search(r"One sequence over 4 GPUs: .*all-gather: .* by the fit, which has ", out)
    assert "FlashAttention-4" in out.splitlines()[0]  # the fastest kernel that rows have
    code, out, _ = console(capfd, "advise", "--model", "qwen3_4b", "--gpus", "4", "--seq-len", "65536", "--json")
    kinds = {each["evidence"] for each in json.loads(out)}
    assert kinds == {"one_rank", "projected"}
    assert "speeds of hardware=h100 cannot be predicted" in refusal(
        capfd, "project", "--model", "qwen3_4b", "--hardware", "h100"
    )


def test_a_model_of_ones_own_is_found_in_a_config_folder(capfd, tmp_path):
    text = (RESULTS.parent / "conf/model/qwen3_4b.yaml").read_text().replace("name: qwen3_4b", "name: ours")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/ours.yaml").write_text(text)
    words = ["--model", "ours", "--gpus", "4", "--seq-len", "65536", "--config-dir", str(tmp_path)]
    code, out, _ = console(capfd, "advise", *words)
    assert code == 0
    assert "model=ours" in out


def test_measuring_runs_three_methods_as_one_real_rank_and_says_why_it_cannot(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["--model", "qwen3_4b", "--gpus", "4", "--seq-len", "65536", "--measure"]
    ran = []

    def run(*words):
        ran.append(words)
        return pd.DataFrame({"status": ["unsupported"], "reason": ["nobody proved it"]})

    monkeypatch.setattr(api, "run", run)
    far = ["--model", "qwen3_4b", "--gpus", "16", "--seq-len", "65536", "--measure", "--network", "10"]
    assert "no file of conf/link has 10 GiB/s" in refusal(capfd, "advise", *far)
    assert not ran
    told = refusal(capfd, "advise", *asked)
    assert "--measure: workload=train_step" in told
    assert told.rstrip().endswith("unsupported: nobody proved it")
    assert {"world=one_rank", "link=nvlink", "method=ulysses", "sp_size=4", "campaign=advised"} <= set(ran[0])


@pytest.mark.parametrize(
    ("model", "gpus", "seq_len", "named"),
    [
        ("qwen3_4b", "64", "1048576", "One sequence over 64 GPUs: Ulysses cannot split 32 heads over 64 GPUs; ring: "),
        ("qwen3_4b", "2", "65536", "Sequences side by side: one GPU a sequence, 2 at once: "),
        ("qwen3_8b", "2", "1048576", "Sequences side by side: no sequence fits on one GPU."),
        ("gpt_oss_20b_dense", "8", "131072", "The fit rests on models whose layers are all full; its errors do not "),
    ],
)
def test_advice_says_what_cannot_be_split_or_held(capfd, model, gpus, seq_len, named):
    code, out, _ = console(capfd, "advise", "--model", model, "--gpus", gpus, "--seq-len", seq_len)
    assert code == 0
    assert any(line.startswith(named) for line in out.splitlines()), out


@pytest.mark.parametrize("words", [["advise", "--model", "qwen3_4b", "--gpus", "4", "--seq-len", "65536"], ["plan"]])
def test_a_price_is_positive(capfd, words):
    assert "price=0 must be positive" in refusal(capfd, *words, "--price", "0")


def test_advice_for_two_nodes_is_measured_on_two_nodes(capfd):
    _, out, _ = console(capfd, "advise", *ROWS, "--model", "qwen3_4b", "--gpus", "16", "--seq-len", "65536")
    told, _, words = out.splitlines()[-1].partition("sp-bench submit ")
    assert told.startswith("Measure it on 2 hosts ")
    assert {"engine=fsdp2", "num_nodes=2", "fabric=network", "dtype=bfloat16"} <= set(words.split())
    assert words.endswith(" --cluster mine")
    assert "; USP over 16 " in out.splitlines()[-3]


@pytest.mark.parametrize(
    ("seq_len", "told"),
    [
        ("128K", "seq_len='128K' must be a whole number in plain digits: 131072"),
        ("4096,8192", "--seq-len 4096,8192: give one length"),
    ],
)
def test_advice_is_about_one_length_in_plain_digits(capfd, seq_len, told):
    assert told in refusal(capfd, "advise", "--model", "qwen3_4b", "--gpus", "4", "--seq-len", seq_len)


def test_less_memory_makes_no_faster_answer_that_more_did_not_name(capfd):
    """The second needs the host; the first, which fits without, says that it would be faster."""
    words = ["advise", "--model", "qwen3_8b", "--gpus", "8", "--seq-len", "1048576", "--memory"]
    _, out, _ = console(capfd, *words, "79.2")
    assert re.search(r"^Memory: .* GiB that tensors can take of 79\.2 a GPU ", out.splitlines()[1])
    faster = re.search(r"Faster by the fit: .* ([\d,]+) tokens/s a GPU, .*, and ([\d,]+) GiB of each host's", out)
    assert faster
    _, out, _ = console(capfd, *words, "60")
    assert f" {faster[1]} tokens/s a GPU" in out.splitlines()[2]
    assert f", and {faster[2]} GiB of each host's memory; " in out.splitlines()[1]
    assert "Faster by the fit" not in out


def test_a_projection_has_the_ways_of_advice_unless_told_what_to_recompute(capfd):
    asked = ["--model", "qwen3_8b", "--gpus", "8", "--seq-len", "131072", "--json"]
    advised, projected, full = [
        json.loads(console(capfd, *words, *asked)[1])[0]
        for words in (["advise"], ["project"], ["project", "--recompute", "full"])
    ]
    assert advised["overrides"] == projected["overrides"] != full["overrides"]
    assert advised["step_ms"] == projected["step_ms"]


def test_a_projection_says_how_much_host_memory_is_needed(capfd):
    code, out, _ = console(capfd, "project", "--model", "qwen3_8b", "--gpus", "8", "--seq-len", "1048576")
    assert code == 0
    offloaded = [line for line in out.splitlines() if "1,048,576" in line and "checkpoints offloaded" in line]
    assert offloaded
    assert all(re.search(r", and [\d,]+ GiB of each host's memory$", line.rstrip()) for line in offloaded)


def test_a_projection_says_what_was_left_out_of_its_fit(capfd):
    words = ("project", *ROWS, "--model", "qwen3_4b", "--gpus", "4,64", "--seq-len", "65536")
    code, out, errors = console(capfd, *words)
    assert (code, errors) == (0, "")
    assert "left out of the fit" in out
    assert "extrapolated" in out
    code, out, _ = console(capfd, *words, "--json")
    found = json.loads(out)
    assert {each["gpus"] for each in found} == {4, 64}
    assert all(each["step_ms"] > 0 and 0 < each["relative_error"] < 5 for each in found)


def test_a_projection_has_steps_of_one_real_rank_before_the_fits(capfd):
    words = ["project", "--model", "qwen3_8b", "--gpus", "8,512", "--seq-len", "131072", "--recompute", "selective"]
    code, out, _ = console(capfd, *words)
    assert code == 0
    assert "Steps of one real rank are of h200x1_one_rank_map." in out
    code, out, _ = console(capfd, *words, "--json")
    evidence = [(each["gpus"], each["evidence"]) for each in json.loads(out)]
    assert evidence[:2] == [(8, "one_rank")] * 2
    assert set(evidence[2:]) == {(8, "projected"), (512, "projected")}


def test_batches_of_documents_are_projected_under_each_policy_and_marked_as_modelled(capfd, tmp_path):
    (tmp_path / "lengths.csv").write_text("\ufefftokens\n16384\n256\n1024\n", "utf-8")
    words = ["project", "--lengths", f"fixed:4096,@{tmp_path / 'lengths.csv'}", "--model", "qwen3_4b", "--gpus", "4"]
    code, out, _ = console(capfd, *words, "--seq-len", "16384")
    assert code == 0
    assert "Modelled: no batch was run." in out
    assert "left out of the fit" in out
    code, out, _ = console(capfd, *words, "--seq-len", "16384", "--json")
    found = json.loads(out)
    assert {each["evidence"] for each in found} == {"projected"}
    assert {each["policy"] for each in found} == {"static, in turn", "static, balanced", "per document", "dynamic"}
    assert all(each["over_bound"] >= 1 - 1e-9 and each["imbalance"] >= 1 for each in found)
    told = refusal(capfd, "project", "--lengths", "wikipedias", "--model", "qwen3_4b", "--gpus", "4")
    assert "--lengths wikipedias: did you mean wikipedia? use fixed:TOKENS" in told


def test_the_map_says_on_which_cells_it_rests(capfd):
    code, out, _ = console(capfd, "project", *ROWS[:1], "--map", "--kernel", "cudnn")
    assert code == 0
    last = out.splitlines()[-5:]
    assert any(line.startswith("Its rates rest on ") and "h200x2_fabrics" in line for line in out.splitlines()), last
    assert "left out of the fit" in out


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        (["--lengths", "wikipedia"], "--lengths"),
        (["--json"], "--json"),
        (["--model", "qwen3_4b", "--gpus", "8"], "--gpus"),
    ],
)
def test_the_map_refuses_what_it_would_ignore(capfd, words, ignored):
    told = refusal(capfd, "project", "--map", "--kernel", "cudnn", *words)
    assert f"--map with {ignored}" in told
    assert "--map takes --gpus-per-node, --hardware, --kernel" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpus", "12"), "--gpus 12: use powers of two"),
        (("--gpus", "8", "--model", "qwen9"), "qwen9"),
        (("--gpus", "8", "--kernel", "math"), "kernel=math has no rows here; use one of cudnn"),
        (("--gpus", "8", "--hardware", "b200"), "h200 has them: --hardware h200 --memory GIB says what fits"),
    ],
)
def test_what_cannot_be_predicted_is_refused(capfd, words, told):
    given = {"--model": "qwen3_4b", "--gpus": "8"} | dict(zip(words[::2], words[1::2], strict=True))
    options = [word for pair in given.items() for word in pair]
    assert told in refusal(capfd, "advise", *ROWS[:1], "--seq-len", "65536", *options)


def test_hardware_with_rows_of_one_gpu_alone_is_told_whose_rows_do_and_how_to_give_its_memory(capfd):
    rows = [*ROWS, str(RESULTS / "reference_smoke"), str(RESULTS / "h100_kernels")]  # of CPUs, and of one H100
    words = ["--model", "qwen3_4b", "--gpus", "8", "--seq-len", "65536"]
    told = refusal(capfd, "advise", *rows, *words, "--hardware", "h100")
    assert "speeds of hardware=h100 cannot be predicted" in told
    assert "; h200 has them, and computes alike by its data sheet: --hardware h200 --memory 79.2 says" in told
    code, out, _ = console(capfd, "advise", *rows, *words, "--hardware", "h200", "--memory", "79.2")
    assert code == 0
    assert " GiB that tensors can take of 79.2 a GPU" in out
    assert "no hardware has them here" in refusal(capfd, "advise", rows[-1], *words, "--hardware", "h100")


def test_a_command_for_gpus_with_other_memory_is_for_the_gpus_of_the_machine_it_runs_on(capfd, monkeypatch):
    words = ["advise", "--model", "qwen3_8b", "--seq-len", "131072", "--gpus"]
    for memory, name in (("79.2", "device"), ("141", "h200")):
        _, out, _ = console(capfd, *words, "8", "--memory", memory)
        assert f" hardware={name} " in out.splitlines()[-1]
    _, out, _ = console(capfd, *words, "16", "--memory", "79.2")
    assert "(hardware= by name where you submit without such GPUs; " in out.splitlines()[-1]
    eight = tuple(hardware.Gpu("NVIDIA H100 80GB HBM3", f"GPU-{n}", 80 * 2**30, (9, 0)) for n in range(8))
    monkeypatch.setattr(hardware, "gpus", lambda: hardware.Gpus("580", eight))
    for packages, told in (({}, True), ({"flash-attn-4": "4.0"}, False)):
        monkeypatch.setattr(hardware, "package_versions", lambda packages=packages: packages)
        _, out, _ = console(capfd, *words, "8", "--memory", "79.2")
        needs = (
            "Not on this machine: kernel flash_attn_4 needs the flash-attn-4 package: pip install --pre flash-attn-4."
        )
        assert (needs in out.splitlines()) == told
    words = out.splitlines()[-1].partition("sp-bench run ")[2].split()
    code, out, err = console(capfd, "plan", *words)
    assert code == 0, err
    assert "1 to run" in out
    of_rows = [word.replace("hardware=device", "hardware=h200") for word in words]
    assert "this machine has NVIDIA H100" in refusal(capfd, "plan", *of_rows)


def test_help_says_what_advice_assumes_unless_told(capfd):
    code, out, _ = console(capfd, "advise", "--help")
    lines = " ".join(out.replace("│", " ").split())
    assert code == 0
    for option, default in (("hardware", "h200"), ("gpus-per-node", "8"), ("network", "45.0")):
        assert f"[default: {default}]" in lines.partition(f"--{option} ")[2].partition(" --")[0], option
