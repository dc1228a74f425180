import re
import subprocess
import sys

import pytest
from rich.console import Console

from sp_bench.driver import progress
from sp_bench.rows import store

from .console import console, refusal


@pytest.fixture
def plan(capfd, tmp_path, monkeypatch):
    """`plan("sweep=smoke")` is what `sp-bench plan sweep=smoke` prints; it leaves an empty folder empty."""
    monkeypatch.chdir(tmp_path)

    def printed(*arguments: str) -> str:
        code, out, err = console(capfd, "plan", *arguments)
        assert (code, err) == (0, "")
        assert list(tmp_path.iterdir()) == []
        return out

    return printed


def test_a_plan_shows_validity_and_counts(plan):
    printed = plan("method=ulysses,ring", "sp_size=3,4", "seq_len=6144,6145")
    assert printed.splitlines()[-1] == "8 trials: 3 to run, 5 unsupported; nothing was launched"
    assert "num_heads=8 cannot be split over sp_size=3" in printed
    assert "nearest lengths: 6144 or 6152" in printed


def test_a_plan_for_gpus_says_about_how_long_they_will_be_busy(plan):
    words = ("sweep=h200x2_step_long", "seq_len=131072", "method.head_chunks=null")
    (told,) = [line for line in plan(*words).splitlines() if line.startswith("devices: ")]
    begins = "devices: 1 trial on GPUs, about 4 minutes, "  # it took 125 s
    assert re.fullmatch(rf"{begins}\d+% of the trials' time in timed steps; 0\.\d+ GPU-hours", told)
    hours, cost = re.search(r"; (\S+) GPU-hours \((\S+) at 2.5 each\)", plan(*words, "--price", "2.5")).groups()
    assert float(cost) == pytest.approx(2.5 * float(hours), rel=0.01)
    assert "devices: 3 trials on GPUs, about 10 minutes" in plan(*words, "replicates=3")
    assert "devices:" not in plan("sweep=smoke")
    assert re.search(r"devices: 20 trials and 6 searches on GPUs, about 5\d minutes", plan("sweep=h200x2_theirs"))
    mixed = plan(*words, "sp_size=2,3")  # no machine splits these heads over 3 ranks
    assert "num_heads=" in mixed
    assert told in mixed


def test_a_search_whose_steps_would_miss_their_deadline_says_so_before_it_runs(plan):
    one = ("workload.mlp_tile_tokens=null", "workload.checkpoint_offload=false", "engine.optimizer_offload=null")
    words = ("sweep=h200x2_longest", "method=ulysses", "workload.activation_checkpointing=full", *one)
    alone = (*words, "hardware.allocator=expandable_segments", "hardware.threads_per_rank=null")
    probe, whole = (line for line in plan(*alone, "deadlines.measure=130").splitlines() if line.startswith("warning: "))
    assert "it would end at about" in probe
    assert "it would end fit only, as no whole step can confirm about" in whole
    enough = [
        int(re.findall(r"more than deadlines.measure=130; use (\d+) or more", each)[0]) for each in (probe, whole)
    ]
    assert 130 < enough[0] < enough[1]
    assert "warning: " not in plan(*alone, f"deadlines.measure={enough[1]}")
    assert "it would end fit only" in plan(*alone, f"deadlines.measure={enough[1] - 1}")


def test_a_search_with_one_rank_that_nothing_proves_says_so_on_a_machine_without_gpus(plan):
    words = ("only.sp_size=8", "only.method=ulysses", "only.workload.checkpoint_offload=false")
    told = plan("sweep=one_rank_longest", *words)
    assert "tokens, which end it as unsupported: world=one_rank: no ok row of real ranks in results proves uly" in told
    assert "warning: " not in told


def test_a_file_of_document_lengths_is_read_once_and_the_trial_has_what_it_says(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("512 256 256")
    (tmp_path / "other.yaml").write_text("- 512\n- 512\n")
    words = ("kernel=math", "seq_len=1024", "workload.packing=file")
    code, out, err = console(capfd, "plan", *words, "workload.document_lens=@one.txt,@other.yaml")
    assert (code, err) == (0, "")
    assert "workload.document_lens=512,256,256 " in out
    assert "workload.document_lens=512,512 " in out
    code, out, err = console(capfd, "plan", *words, "workload.document_lens=@gone.txt")
    assert (code, out) == (2, "")
    assert "the list of documents in gone.txt cannot be read" in err


def test_a_plan_says_how_unevenly_each_layout_cuts_a_pack(plan):
    lengths = "workload.document_lens='1500,1000,700,500,396'"
    listed = ("workload.packing=file", lengths, "seq_len=4096", "kernel=math", "sp_size=2")
    told = plan("method=ring,ulysses", "method.layout=contiguous", *listed)
    pack = "pack of 4,096 tokens: 5 documents, 704 tokens in median, 1,504 at most; attention of the busiest of 2 ranks"
    assert pack in told
    assert "ulysses contiguous 1.00" in told
    assert "ring document_zigzag 1.00" in plan("method=ring", "method.layout=zigzag,document_zigzag", *listed)


def test_a_plan_shows_what_is_committed(finished):
    folder, arguments, _ = finished
    done = subprocess.run(
        [sys.executable, "-m", "sp_bench", "plan", *arguments], cwd=folder, capture_output=True, text=True
    )
    assert "done: ok" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2 trials: 2 done")


def test_the_smoke_sweep_holds_every_own_method_and_one_unsupported_point(plan):
    printed = plan("sweep=smoke")
    assert "1 unsupported" in printed.splitlines()[-1]
    for word in ("single", "ulysses", "ring", "all_gather", "usp", "zigzag", "striped", "train_step/step"):
        assert word in printed


def test_an_exchange_has_no_kernel_model_or_length(plan):
    heading, line, _ = plan("workload=collective", "method=ring").splitlines()
    columns = dict(zip(heading.split(), line.split(), strict=False))
    assert [columns[name] for name in ("method", "kernel", "model", "seq_len", "sp")] == ["ring", *"---", "2"]


def test_replicates_are_planned_and_not_composed(plan):
    assert plan("method=ring", "replicates=6").splitlines()[-1].startswith("6 trials")


def test_an_option_of_a_swept_method_that_the_default_lacks_is_set_for_each(plan):
    printed = plan("method=ring,usp", "method.dkv_dtype=input,float32")
    assert printed.splitlines()[-1].startswith("4 trials: 4 to run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["method=ulyses"],
            "method=ulyses: did you mean ulysses? method is one of all_gather, deepspeed_ulysses, deepspeed_ulysses_hf",
        ),
        (["sq_len=5"], "sq_len is not a field; did you mean seq_len?"),
        (["seq_len=0"], "seq_len=0 must be positive"),
        (["seq_len=1024,-5"], "seq_len=-5 must be positive"),
        (["seq_len=2.5"], "seq_len=2.5 must be a whole number"),
        (["model.num_heads=7"], "model.num_kv_heads=2 does not divide model.num_heads=7; use one of [1, 7]"),
        (["model.num_kv_heads=3"], "model.num_kv_heads=3 does not divide model.num_heads=8"),
        (["seq_len=range(1,1e9)"], "the sweep has 999,999,999 points, more than max_points=2000"),
        (["seq_len=range(0,100)", "max_points=99"], "the sweep has 100 points, more than max_points=99"),
        (
            ["method=ulysses", "method.layout=zigzag"],
            "ulysses gathers the whole sequence; use contiguous",
        ),
        (["method=ulysses", "method.dkv_dtype=float32"], "method=ulysses has no such option; it has method.layout"),
        (["campaign=../../x"], "campaign='../../x': use letters, digits"),
        (["campaign=${oc.env:HOME}"], "no interpolation"),
        (["replicates=0"], "replicates=0 must be positive"),
        (["deadlines.init=-1"], "deadlines.init=-1.0 must be positive"),
        (["hydra.run.dir=x"], "Hydra's own settings are fixed"),
        (["--config-dir=nowhere"], "--config-dir nowhere is no folder; it holds folders such as sweep and model"),
        (["workload=train_step", "workload.causal=false"], "workload.causal=false: train_step trains a causal decoder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_creates_no_folder(capfd, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capfd, "run", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_the_composed_config_of_a_trial_can_be_read(capfd):
    code, printed, errors = console(capfd, "run", "method=usp", "sp_size=4", "--cfg", "job")
    assert (code, errors) == (0, "")
    assert "ulysses_degree: 2" in printed
    assert "sp_size: 4" in printed
    assert store.WORK not in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seq_len=-3"], "seq_len=-3 must be positive"),
        (["replicates=0"], "replicates=0 must be positive"),
        (["method=ulysses", "method.dkv_dtype=float32"], "method=ulysses has no such option"),
        (["method=ulysses,ring"], "method=ulysses,ring: --cfg job shows one configuration and takes no sweeps"),
    ],
)
def test_no_configuration_is_shown_that_run_refuses(capfd, words, message):
    assert message in refusal(capfd, "run", *words, "--cfg", "job")


def test_what_all_trials_share_stands_above_the_table_once(plan):
    shared, headings, *_ = plan("method=ring,ulysses", "sp_size=2,3").splitlines()
    assert shared.startswith(
        "all trials: kernel cpu_flash, workload attention/forward_backward, fabric gloo, model tiny,"
    )
    assert headings.split() == ["#", "method", "layout", "sp", "state"]
    headings, *_ = plan("method=ring", "sp_size=2").splitlines()
    assert headings.split()[:3] == ["#", "method", "layout"]


def test_on_a_narrow_terminal_each_trial_is_a_record_within_its_width(plan, monkeypatch):
    monkeypatch.setattr(progress, "console", lambda: Console(width=40, force_terminal=True, file=sys.stdout))
    records = plan("method=ring,ulysses", "sp_size=2", "seq_len=1024,2048", "kernel=math,cpu_flash").splitlines()[1:-1]
    assert all(len(re.sub(r"\x1b\[\d*m", "", line)) <= 40 for line in records)
    assert re.match(r"0 method \w+, layout \w+,", records[0])
    assert sum("to run" in line for line in records) == 8
