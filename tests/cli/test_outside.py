"""Methods, kernels and engines from outside, by the real command line: the page's own example, and what is wrong with
variants of it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from sp_bench.config import outside

from .console import console, refusal

PAGE = (Path(__file__).parents[2] / "docs" / "OUTSIDE.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2", "kernel=math")

TAGGED = "            with ledger.attention():  # the method's own traffic, not the training engine's\n"
RAW = f"            dist.all_reduce(received.zero_(), group=group)\n{TAGGED}"
GROUP = ("sp_size=2", "seq_len=96", "isolation=group")  # a trial that fails ends its group
FORM = "return ulysses_traffic(shape, sp_size, sp_size)"
LOW = f"return {{key: size * 3 / 5 for key, size in {FORM.removeprefix('return ')}.items()}}"


def edited(old: str, new: str) -> str:
    assert EXAMPLE.count(old) == 1, old
    return EXAMPLE.replace(old, new)


def run(folder: Path, *arguments: str, path: Path | None = None) -> str:
    """What `sp-bench run` prints, in `folder`, with packages of `path`."""
    found = os.pathsep.join(map(str, filter(None, [path, *map(Path, filter(None, sys.path))])))
    command = [sys.executable, "-m", "sp_bench", "run", *arguments, *SMALL]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": found})
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: a trial failed, as some must
    return done.stdout


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example and variants of it, and the rows of a run of them all."""
    folder = tmp_path_factory.mktemp("outside")
    files = {
        "my_ulysses": EXAMPLE,
        "too_low": edited(FORM, LOW),
        "raw": edited(TAGGED, RAW),
        "raw_without_form": f"{edited(TAGGED, RAW)}\n\ntraffic = None\ndel kernel_calls\n",
        "too_often": edited("return 1, 1", "return 2, 1"),
        "broken": "import nothing_of_the_kind\n",
    }
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    paths = ",".join(f"{name}.py" for name in files)
    run(folder, f"method.path={paths}", "method.fused=false", *GROUP, "campaign=mine")
    return folder


@pytest.fixture(scope="module")
def rows(campaign: Path) -> pd.DataFrame:
    return pd.read_parquet(campaign / "results" / "mine").set_index("method")


def test_the_example_of_the_page_runs_with_its_option(rows):
    mine = rows.loc["my_ulysses"]
    assert mine["status"] == "ok"
    assert mine["comm_counted_bytes"] == mine["comm_predicted_bytes"] > 0
    assert '"own":{"fused":false}' in mine["config"]
    assert re.fullmatch("[0-9a-f]{8}", mine["method_source"])
    assert (mine["implementation"], mine["primitive"]) == ("my_lab", "all_to_all")
    assert mine["counted_attention_flops"] == mine["hardware_flops"] > 0
    assert mine["counted_matmul_flops"] == 0


def test_a_closed_form_that_is_too_low_is_incorrect(rows):
    assert rows.loc["too_low", "status"] == "incorrect"
    assert "differ from the closed form: backward all_to_all: counted" in rows.loc["too_low", "reason"]


def test_collectives_outside_the_ledger_are_incorrect_and_say_what_to_do(rows):
    assert rows.loc["raw", "status"] == "incorrect"
    for words in ("gradients all_reduce: counted", "`with ledger.attention():`", "declare traffic = None"):
        assert words in rows.loc["raw", "reason"]


def test_a_method_without_a_closed_form_has_its_bytes_counted(rows):
    row = rows.loc["raw_without_form"]
    assert row["status"] == "ok"
    assert pd.isna(row["comm_predicted_bytes"])
    assert row["comm_counted_bytes"] > rows.loc["my_ulysses", "comm_counted_bytes"]


def test_other_calls_of_the_kernel_than_said_are_incorrect_and_none_said_are_uncounted(rows):
    assert rows.loc["too_often", "status"] == "incorrect"
    assert "1 times forward and 1 backward; the method's blocks make it 2 and 1" in rows.loc["too_often", "reason"]
    uncounted = rows.loc["raw_without_form", ["counted_matmul_flops", "counted_attention_flops", "launched_kernels"]]
    assert uncounted.isna().all()


def test_an_error_in_the_import_of_one_method_ends_its_own_trials_only(rows):
    assert rows.loc["broken", "status"] == "error"
    assert "broken.py), line 1: ModuleNotFoundError: No module named 'noth" in rows.loc["broken", "reason"]


def test_no_row_says_where_a_file_was(campaign, rows):
    assert str(campaign) not in str(rows.to_dict("records"))


def test_the_report_names_a_method_from_outside_as_any_other(campaign):
    page = (campaign / "results" / "mine" / "_work" / "report" / "index.html").read_text()
    assert "my_ulysses (my_lab)" in page


def test_show_repeats_a_method_from_outside_in_the_folder_of_its_file(campaign, rows, capfd, monkeypatch, tmp_path):
    trial = rows.loc["my_ulysses", "trial_id"]
    folder = str(campaign / "results" / "mine")
    monkeypatch.chdir(campaign)
    _, out, _ = console(capfd, "show", trial, folder)
    (command,) = re.findall("^repeat it alone: sp-bench (.*)$", out, re.MULTILINE)
    assert {"method.path=my_ulysses.py", "method.fused=false"} <= set(command.split())
    code, out, err = console(capfd, "plan", *command.split()[1:-1], f"results_root={tmp_path}")
    assert (code, err) == (0, "")
    assert "1 trial: 1 to run" in out


def test_a_package_brings_a_method_with_an_option(tmp_path):
    site = tmp_path / "site"
    (site / "my_lab-1.0.dist-info").mkdir(parents=True)
    (site / "my_lab-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my-lab\nVersion: 1.0\n")
    entry = "[sp_bench.methods]\nlab_ulysses = my_lab.attention\n"
    (site / "my_lab-1.0.dist-info" / "entry_points.txt").write_text(entry)
    (site / "my_lab").mkdir()
    (site / "my_lab" / "__init__.py").touch()
    (site / "my_lab" / "attention.py").write_text(EXAMPLE)
    words = ("method=lab_ulysses", "method.fused=true", "sp_size=2", "seq_len=96", "workload=train_step")
    run(tmp_path, *words, "--no-report", path=site)
    (row,) = pd.read_parquet(tmp_path / "results" / "default").to_dict("records")
    assert (row["method"], row["status"]) == ("lab_ulysses", "ok"), row["reason"]
    assert '"own":{"fused":true}' in row["config"]
    assert row["method_source"]


# What is refused, or planned, without a launch

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """`write("mine.py", text)` makes a file where commands then run."""

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    monkeypatch.chdir(tmp_path)
    yield write
    outside.forget_files()


def test_options_of_its_own_are_swept_and_tell_trials_apart(write, capfd):
    write("mine.py", EXAMPLE)
    code, printed, errors = console(capfd, "plan", "method.path=mine.py", "method.fused=true,false", "sp_size=2")
    assert (code, errors) == (0, "")
    assert printed.splitlines()[-1].startswith("2 trials: 2 to run")
    assert "method.fused=True" in printed
    assert "method.fused=False" in printed


def test_an_option_of_its_own_names_a_part_of_the_trials(write, capfd):
    write("mine.py", EXAMPLE)
    words = ("method=ulysses,mine", "method.path=mine.py", "sp_size=2")
    code, printed, _ = console(capfd, "plan", *words, "only.method.fused=true")
    assert (code, printed.splitlines()[-1][:7]) == (0, "1 trial")
    refused = refusal(capfd, "plan", *words, "only.method.fusd=true")
    assert refused == "sp-bench: only.method.fusd=true: no method of these 2 trials has an option fusd"


def test_ours_and_others_run_beside_each_other(write, capfd):
    write("mine.py", EXAMPLE)
    code, printed, _ = console(capfd, "plan", "method=ulysses,mine", "method.path=mine.py", "sp_size=2")
    assert (code, printed.splitlines()[-1][:8]) == (0, "2 trials")
    code, printed, _ = console(capfd, "run", "method.path=mine.py", "--cfg", "job")
    assert code == 0
    assert "fused: true" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method.fusd=true"], "method.fusd: method=mine has no such option; it has method.layout, method.fused"),
        (["method.fused=3"], "method.fused=3 must be true or false"),
        (["method.head_chunks=2"], "method=mine has no such option"),
        (["method=ring", "method.fused=true"], "method.fused: method=ring has no such option"),
        (["method=minr"], "method=minr: did you mean mine? method is one of all_gather, "),
        (["method.path=mine.py"], "give it once"),
    ],
)
def test_a_wrong_option_is_one_line(write, capfd, arguments, message):
    write("mine.py", EXAMPLE)
    assert message in refusal(capfd, "plan", "method.path=mine.py", *arguments)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("nowhere.py", "method.path=nowhere.py is no Python file; give a path such as method.path=my_method.py"),
        ("my-method.py", "a method is called as its file; use letters, digits and _, as in my_method.py"),
        ("ring.py", "method ring (ring.py): ring is a method of sp_bench; rename yours"),
        ("a/mine.py,b/mine.py", "is called mine as well; rename one of the files"),
    ],
)
def test_a_file_that_cannot_be_a_method_is_one_line(write, capfd, paths, message):
    for name in ("my-method.py", "ring.py", "a/mine.py", "b/mine.py"):
        write(name, EXAMPLE)
    assert message in refusal(capfd, "plan", f"method.path={paths}")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("IMPLEMENTATION", "CODE", 'has no IMPLEMENTATION; write: IMPLEMENTATION = "my_lab"'),
        ('"my_lab"', '"sp_bench"', "IMPLEMENTATION = sp_bench says that it is ours; write: "),
        ("PRIMITIVE =", "MOVES =", 'has no PRIMITIVE; write: PRIMITIVE = "send_recv"'),
        ("def layout(", "def places(", "has no layout; write: def layout(method, sp_size): return SequenceLayout("),
        ("def layout(method, sp_size)", "def layout(method)", "layout is called with 2 arguments; write: def layout("),
        ("def unsupported_reason(", "def reason(", "has no unsupported_reason; write: def unsupported_reason("),
        ("def traffic(", "def sent(", "has no traffic; write: def traffic("),
        ("def open(", "def enter(", "has no open; write: @contextmanager, def open("),
        (
            "@dataclass(frozen=True)",
            "@dataclass",
            "Options is no frozen dataclass; write @dataclass(frozen=True) above",
        ),
        ("fused: bool = True ", "fused: bool ", "Options.fused has no default; write: fused: int = 1"),
        ("fused: bool = True ", "layout: str = 'zigzag' ", "Options.layout is a field of every method's config"),
        ("fused: bool = True ", "fused: list = None ", "Options.fused must be int, float, bool, str or a Literal"),
        ('"""Ulysses,', 'import torch\n"""Ulysses,', "line 1: imports torch at its top; import it inside open"),
    ],
)
def test_what_a_method_lacks_is_one_line_with_an_example(write, capfd, old, new, message):
    write("mine.py", edited(old, new))
    line = refusal(capfd, "plan", "method.path=mine.py", "sp_size=2")
    assert line.startswith("sp-bench: method mine (mine.py)")
    assert message in line


def test_planning_a_method_from_outside_imports_no_torch(write, tmp_path):
    write("mine.py", EXAMPLE)
    code = (
        "import sys; from sp_bench import cli; sys.argv = ['sp-bench', 'plan', 'method.path=mine.py', 'sp_size=2']\n"
        "try: cli.main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "1 to run" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_a_module_that_imports_torch_elsewhere_is_refused_too(write, tmp_path):
    write("mine.py", f"import sp_bench.attention.exchange\n{EXAMPLE}")
    command = [sys.executable, "-m", "sp_bench", "plan", "method.path=mine.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "(mine.py) imports torch through a module that it imports at its top; import that module" in done.stderr
