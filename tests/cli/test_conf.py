"""Files of conf with a slip: one line that names the file and the way out, where something else would have run."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from sp_bench.planning import overrides

from .console import console, refusal

Write = Callable[[str, str], None]
HEADER = "# @package _global_\n"
BLOCKS = "sweep:\n  blocks:\n    - method: [ring, usp]\n      seq_len: [1024, 2048]\n"


def forget() -> None:
    overrides.choices.cache_clear()
    overrides.conf_file.cache_clear()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """`write("sweep/mine", text)` makes that file in a copy of conf, which commands then read."""
    conf = tmp_path / "conf"
    shutil.copytree(overrides.conf_folder(), conf)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(overrides, "conf_folder", lambda: conf)
    forget()
    yield lambda name, text: (conf / f"{name}.yaml").write_text(text) and None
    forget()


@pytest.mark.parametrize("above", ["", "\n"])
def test_a_sweep_of_ones_own_runs_its_blocks(write, capfd, above):
    write("sweep/mine", f"{above}{HEADER}# Mine.\ncampaign: mine\nreplicates: 3\n{BLOCKS}")
    code, out, err = console(capfd, "plan", "sweep=mine")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("12 trials")


@pytest.mark.parametrize("name", [path.stem for path in (overrides.conf_folder() / "sweep").glob("*.yaml")])
def test_a_sweep_of_conf_asks_for_nothing_that_no_machine_can_run(name, capfd, tmp_path):
    code, out, err = console(capfd, "plan", f"sweep={name}", f"results_root={tmp_path}")  # where nothing has run
    assert (code, err) == (0, "")
    refusals = [line.partition("unsupported: ")[2] for line in out.splitlines() if "unsupported: " in line]
    needs = r"(hardware|kernel|method|engine|workload\.(model_code|linear_dtype))[ =]\w+ needs "
    unproven = "world=one_rank: no ok row of real ranks "  # its command makes one
    for_ever = [refusal for refusal in refusals if not re.match(f"{needs}|{unproven}", refusal)]
    # smoke shows what a refusal looks like, and the gates of packed documents who refuses them
    assert bool(for_ever) == (name in ("smoke", "cpu_packed_gate", "h200x2_packed_gate"))


WAY_OUT = "begin it with the line '# @package _global_', and list what it sweeps over below 'sweep: blocks:'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BLOCKS, f"is not a sweep: {WAY_OUT}"),
        (f"# Mine.\n{HEADER}{BLOCKS}", f"is not a sweep: {WAY_OUT}"),  # where Hydra does not look for it
        ("", f"is not a sweep: {WAY_OUT}"),
        (HEADER, f"has no blocks: {WAY_OUT}"),
        (f"{HEADER}sweep:\n", f"has no blocks: {WAY_OUT}"),
        (f"{HEADER}sweep:\n  blocks: []\n", f"has no blocks: {WAY_OUT}"),
        (f"{HEADER}sweep:\n  blocks:\n    method: ring\n", "blocks must be a list, each block after a dash"),
        (
            f"{HEADER}replicats: 3\n{BLOCKS}",
            "replicats is not a key of a sweep; did you mean replicates? keys: sweep, c",
        ),
        (f"{HEADER}defaults: []\n{BLOCKS}", "defaults is not a key of a sweep; keys: sweep, campaign, results_root, "),
        (f"{HEADER}seq_len: 1024\n{BLOCKS}", "seq_len is a field of a trial; it goes into the blocks"),
        (f"{HEADER}method.layout: zigzag\n{BLOCKS}", "method.layout is a field of a trial; it goes into the blocks"),
        (f"{HEADER}{BLOCKS}  replicates: 3\n", "sweep.replicates is not a key; sweep has blocks only"),
    ],
)
def test_a_sweep_file_that_would_run_something_else_is_refused(write, capfd, text, message):
    write("sweep/mine", text)
    line = refusal(capfd, "plan", "sweep=mine")
    assert "conf/sweep/mine.yaml" in line
    assert message in line


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "sweep/mine",
            f"{HEADER}sweep:\n  blocks:\n    - method: [ring\n      seq_len: 3\n",
            ", line 5, is not YAML: ",
        ),
        ("sweep/mine", f"{HEADER}sweep:\n\tblocks: []\n", ", line 3, is not YAML: found character"),
        ("sweep/mine", f"{HEADER}campaign: a\ncampaign: b\n{BLOCKS}", ", line 3, is not YAML: found duplicate key"),
        ("fabric/mine", "name: mine\n backend: gloo\n", ", line 2, is not YAML: mapping values are not allowed here"),
        ("fabric/mine", "- mine\n", " must map keys to values, such as name: mine"),
        ("fabric/mine", "name: mine\0\n", " cannot be read: unacceptable character"),
    ],
)
def test_a_file_that_is_not_yaml_is_one_line_with_its_place(write, capfd, name, text, message):
    write(name, text)
    assert f"conf/{name}.yaml{message}" in refusal(capfd, "plan", f"{name.partition('/')[0]}=mine")


@pytest.mark.parametrize("name", ["config", "fabric/gloo"])
@pytest.mark.parametrize("words", [[], ["--cfg", "job"]])
def test_a_file_that_nobody_chose_is_read_as_well(write, capfd, name, words):
    write(name, "name: [gloo\n")
    assert f"conf/{name}.yaml, line 2, is not YAML: " in refusal(capfd, "run", *words)


@pytest.mark.parametrize("group", overrides.GROUPS)
def test_a_copy_of_a_file_with_the_name_unedited_is_refused_with_both_names(write, capfd, group):
    original = overrides.choices(group)[0]
    write(f"{group}/mine", (overrides.conf_folder() / group / f"{original}.yaml").read_text())
    forget()
    line = refusal(capfd, "plan", f"{group}=mine")
    assert f"conf/{group}/mine.yaml says name: {original}; rows are labelled by it: write name: mine" in line


def test_a_wrong_name_is_found_in_a_block_and_in_a_default(write, capfd):
    write("fabric/mine", "name: wrong\nbackend: gloo\nenv: {}\n")
    write("sweep/mine", f"{HEADER}sweep:\n  blocks:\n    - fabric: [gloo, mine]\n")
    assert "sweep.blocks[0]: conf/fabric/mine.yaml says name: wrong" in refusal(capfd, "plan", "sweep=mine")
    write("fabric/gloo", "backend: gloo\nenv: {}\n")
    forget()
    assert "conf/fabric/gloo.yaml gives no name; rows are labelled by it: write name: gloo" in refusal(capfd, "plan")


def test_a_sweep_names_no_file_of_a_method(write, capfd):
    write("sweep/mine", f"{HEADER}sweep:\n  blocks:\n    - method.path: mine.py\n")
    line = refusal(capfd, "plan", "sweep=mine")
    assert "the file of a method is named on the command line only; here choose it by its name" in line


# Files of one's own

MODEL = yaml.safe_load((overrides.conf_folder() / "model" / "tiny.yaml").read_text())


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """`own("conf/sweep/mine", text)` makes that file where commands then run."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)

    yield write
    overrides.use_config_dirs([])


def test_files_beside_the_working_folder_are_found_first(own, capfd):
    own("conf/model/mine", yaml.safe_dump(MODEL | {"name": "mine", "num_heads": 16}))
    own("conf/model/tiny", yaml.safe_dump(MODEL | {"num_kv_heads": 2}))
    own(
        "conf/sweep/mine",
        f"{HEADER}campaign: mine\nreplicates: 3\ndeadlines: {{init: 7}}\n{BLOCKS}      model: [mine, tiny]\n",
    )
    code, out, err = console(capfd, "plan", "sweep=mine", "replicates=2", "--json")
    assert (code, err) == (0, "")
    models = [trial["config"]["model"] for trial in json.loads(out)["trials"]]
    assert len(models) == 2 * 2 * 2 * 2
    assert {(m["name"], m["num_heads"], m["num_kv_heads"]) for m in models} == {
        ("mine", 16, MODEL["num_kv_heads"]),
        ("tiny", MODEL["num_heads"], 2),
    }
    code, out, _ = console(capfd, "run", "--cfg", "job")
    assert "num_kv_heads: 2" in out, "of the file that is chosen unless told otherwise"


def test_a_folder_that_is_named_comes_before_the_working_folder(own, capfd):
    for folder, seq_len in (("conf", 1024), ("lab", 2048)):
        own(f"{folder}/sweep/mine", f"{HEADER}sweep:\n  blocks:\n    - seq_len: [{seq_len}]\n")
    for words, seq_len in ((["--config-dir", "lab"], 2048), ([], 1024)):
        _, out, _ = console(capfd, "plan", "sweep=mine", "--json", *words)
        assert [trial["config"]["seq_len"] for trial in json.loads(out)["trials"]] == [seq_len]


def test_a_slip_in_a_file_of_ones_own_names_its_path(own, capfd):
    own("lab/fabric/mine", "name: [gloo\n")
    own("conf/model/mine", yaml.safe_dump(MODEL | {"name": "tiny"}))
    assert "lab/fabric/mine.yaml, line 2, is not YAML" in refusal(capfd, "plan", "fabric=mine", "--config-dir", "lab")
    assert "conf/model/mine.yaml says name: tiny" in refusal(capfd, "plan", "model=mine")
    own("conf/model/other", yaml.safe_dump(MODEL | {"name": "other", "heads": 3}))
    assert "model.heads is not a field" in refusal(capfd, "plan", "model=other")
