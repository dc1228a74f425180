"""Options are declared once, and what is made of the declarations."""

import ast
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

import sp_bench
from sp_bench.config.options import BY_PATH, OPTIONS
from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig
from sp_bench.planning import plan
from sp_bench.planning.overrides import conf_folder
from sp_bench.rows import names, schema, store

RESULTS = Path(__file__).parents[2] / "results"
# Its rows are older than workload.attribution, which identities say since.
BEFORE_ATTRIBUTION = "h200x4_headline"


@pytest.mark.parametrize("folder", sorted(p.name for p in RESULTS.iterdir() if p.is_dir()))
def test_committed_rows_keep_their_identity(folder):
    table, problems = store.read(RESULTS / folder, ["cell_id", "trial_id", "replicate", "config"])
    assert problems == []
    assert table.num_rows
    for row in table.to_pylist():
        cell = hashlib.sha256(row["config"].encode()).hexdigest()[:12]
        config = parse(TrialConfig, json.loads(row["config"]))
        if folder != BEFORE_ATTRIBUTION:
            assert plan.canonical(config) == row["config"]
            assert plan.cell_id(config) == cell
        assert (row["cell_id"], row["trial_id"]) == (cell, names.trial_id(cell, row["replicate"]))


def test_a_default_of_a_later_option_leaves_the_identity_as_it_was(make_config):
    plain = make_config(workload="train_step")
    said = make_config(workload="train_step", workload__micro_batches=1, engine="fsdp2")
    assert plan.cell_id(said) == plan.cell_id(plain)
    assert plan.cell_id(make_config(workload="train_step", workload__micro_batches=2)) != plan.cell_id(plain)


def test_each_option_is_explained_and_each_column_is_declared_once():
    assert all(option.doc for option in OPTIONS)
    columns = [column.name for column in schema.COLUMNS]
    assert len(columns) == len(set(columns))
    declared = {option.column: option for option in OPTIONS if option.column}
    assert {c.name: c.doc for c in schema.COLUMNS if c.name in declared} == {n: o.doc for n, o in declared.items()}


def test_an_option_knows_its_path_type_and_what_old_rows_mean():
    launch, chunks = BY_PATH["workload.launch"], BY_PATH["method.head_chunks"]
    assert (launch.column, launch.type, launch.old_rows) == ("launch", str, "eager")
    assert (chunks.column, chunks.type, chunks.old_rows, chunks.none_means) == ("head_chunks", int, None, 1)
    assert BY_PATH["method.name"].column == "method"
    assert BY_PATH["seed"].column is None


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"workload": "train_step"}, {"micro_batches": 1, "engine": "fsdp2", "launch": "eager"}),
        ({"workload": "attention"}, {"micro_batches": None, "engine": None, "launch": "eager"}),
        ({"workload": "train_step", "micro_batches": 8}, {"micro_batches": 8}),
        ({"workload": "train_step", "config": '{"engine":{"name":"deepspeed"}}'}, {"engine": "deepspeed"}),
        ({"primitive": "send_recv by copy engines"}, {"primitive": "send_recv", "exchange": "copy_engines"}),
        ({"primitive": "send_recv"}, {"primitive": "send_recv", "exchange": "collectives"}),
        ({"config": "not JSON"}, {"exchange": "collectives"}),
        ({}, {"core_id": "01234567", "head_chunks": None}),
    ],
)
def test_an_old_row_is_read_as_it_would_be_written_today(tmp_path, written, read):
    row = {"status": "ok", "trial_id": "0123456789ab", "env_id": "01234567", "attempt": 0} | written
    store.write(row, tmp_path)
    (found,) = store.read(tmp_path)[0].to_pylist()
    assert {name: found[name] for name in read} == read
    table, _ = store.read(tmp_path, [*read])
    assert (table.column_names, table.to_pylist()) == ([*read], [read])


# The rule for a new option: it is named in its declaration (in config/), where it is used, in its file of conf and
# in its test. What passes options on or shows them all takes them from OPTIONS, and their words from the declaration.
STEERED = ("costs", "kernels", "attention", "methods", "engines", "training", "workloads", "oracle", "worker.py")
PASSES_ON = ("rows", "look", "report", "cli", "cli.py", "api.py")  # but for files with an own reason to name an option
HAS_A_REASON = {
    *("rows/names.py", "rows/row.py"),  # what old rows mean
    *("look/doctor.py", "look/methods_table.py", "look/pack.py"),
    *("rows/consistency.py", "rows/forms.py", "api.py"),  # what a row repeats, and what names a place of `ratios`
    "cli/predict.py",  # the group of links, and no option
    "cli/documents.py",  # a page's tables of memory
    *("report/cards.py", "report/caveats.py", "report/packed_gate.py", "report/published.py", "report/link_file.py"),
    *(
        "report/figures/steps.py",
        "report/figures/over_ranks.py",
        *("report/explorer/__init__.py", "report/explorer/verdicts.py"),  # like is compared with like
        "report/figures/windows.py",
        "report/figures/style.py",
        "report/figures/traffic.py",
        "report/setup_table.py",  # in which processes rows ran
        "report/held_tables.py",  # the hosts and layers of a line
        "report/figures/plans.py",  # of drawn documents
        *("report/figures/__init__.py", "report/figures/states.py"),  # a figure has the name of what it draws
    ),
}
# By these every cell is placed, grouped and drawn.
AXES = {
    *("method", "kernel", "model", "workload", "pass_kind", "fabric", "hardware", "engine", "device", "dtype"),
    *("seq_len", "sp_size", "dp_replicate_size", "dp_shard_size", "num_heads", "num_kv_heads", "head_dim", "causal"),
}


def named(path: Path) -> set[str]:
    """Of a file the strings, but for docstrings, and the attributes with what they are of: workload.launch."""
    tree = ast.parse(path.read_text())
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    docstrings = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.add(node.value)
        elif isinstance(node, ast.Attribute):
            found.add(".".join(ast.unparse(node).split(".")[-2:]))
    return found


def files(rooms: Sequence[str]) -> list[Path]:
    package = Path(sp_bench.__file__).parent
    return [path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0] in rooms]


def test_what_passes_options_on_names_none():
    for path in files(PASSES_ON):
        file, words = path.relative_to(Path(sp_bench.__file__).parent).as_posix(), named(path)
        options = {
            option.column or option.name
            for option in OPTIONS
            if {option.path, option.column, f"{option.group or 'config'}.{option.name}"} & words
        }
        assert options <= AXES or file in HAS_A_REASON, f"{file} can take {sorted(options - AXES)} from OPTIONS"


def test_the_words_of_an_option_stand_at_its_declaration_alone():
    declared = set()
    for option in OPTIONS:
        for texts in (option.words, option.identifier, option.head, option.under_head):
            filled = [texts] if isinstance(texts, str) else texts.values()
            declared |= {part for text in filled for part in text.split("{}") if " " in part.strip()}
    assert {"nothing recomputed", " micro-batches a step", "loss tile", "copy engines"} <= declared
    also = {"host memory", "Messages alone", "one rank"}  # memory that ran out, a heading, and a kind of evidence
    for path in files(("analysis", "report", "predict")):
        assert not (named(path) & declared) - also, path


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.path)
def test_an_option_is_used_can_be_set_and_is_tested(option):
    conf = conf_folder()
    uses = [*files((*STEERED, "driver", "planning")), Path(sp_bench.__file__).parent / "config" / "documents.py"]
    groups = (conf / option.group).glob("*.yaml") if option.group else [conf / "config.yaml"]
    word = re.compile(rf"(\b|__){option.name}\b")  # hardware__ranks_per_gpu=2 sets it in a test
    assert any(map(word.search, map(Path.read_text, uses)))
    assert any(option.name in yaml.safe_load(path.read_text()) for path in groups) or option.path == "method.own"
    assert any(word.search(path.read_text()) for path in Path(__file__).parents[1].rglob("test_*.py"))
