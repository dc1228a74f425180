"""Options are declared once, and what is made of the declarations."""

import ast
import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml

import sp_bench
from sp_bench.config.options import BY_PATH, OPTIONS
from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import plan
from sp_bench.driver.overrides import conf_folder
from sp_bench.rows import schema, store

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
        assert (row["cell_id"], row["trial_id"]) == (cell, plan.trial_id(cell, row["replicate"]))


def test_a_default_of_a_later_option_leaves_the_identity_as_it_was(make_config):
    plain = make_config(workload="train_step")
    said = make_config(workload="train_step", workload__micro_batches=1, engine="fsdp2")
    assert plan.cell_id(said) == plan.cell_id(plain)
    assert plan.cell_id(make_config(workload="train_step", workload__micro_batches=2)) != plan.cell_id(plain)


def test_each_option_is_explained_and_each_column_is_declared_once():
    assert all(option.doc for option in OPTIONS)
    names = [column.name for column in schema.COLUMNS]
    assert len(names) == len(set(names))
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


# The rule for a new option: it is named in its declaration (config/trial.py), where it is used, in its file of conf and
# in its test. What passes options on or shows them all (rows, plan, identities, names, tables) takes them from OPTIONS.
# Outside the folders whose code an option steers, only a file with an own reason to speak of an option names it.
IMPLEMENTS = ("costs", "kernels", "attention", "methods", "engines", "training", "workloads", "oracle", "worker.py")
# By these every cell is placed, grouped and drawn.
AXES = {
    *("method", "kernel", "model", "workload", "pass_kind", "fabric", "hardware", "engine", "device", "dtype"),
    *("seq_len", "sp_size", "dp_replicate_size", "dp_shard_size", "num_heads", "num_kv_heads", "head_dim", "causal"),
}
USES = {
    "measure/one_rank.py": {
        "link",
    },
    # decide whether and how a trial runs
    "driver/search.py": {
        *("allocator", "device_memory_gib", "document_len", "document_sigma", "fit", "num_nodes", "packing"),
        *("ranks_per_gpu", "seed"),
    },
    "driver/proofs.py": {
        "world",
        *("causal", "packing", "fit", "activation_checkpointing", "checkpoint_offload", "model_code"),
        *("loss_tile_tokens", "mlp_tile_tokens"),
    },
    "driver/device_time.py": {"isolation", "single_step", "timed_steps", "warmup_steps"},
    "driver/plan.py": {
        "world",
        "real_rank",
        *(
            "allocator",
            "backend",
            "checkpoint_offload",
            "dkv_dtype",
            "optimizer_offload",
            "env",
            "warmup_steps",
            "exchange",
            "isolation",
            "launch",
        ),
        "layout",
        "single_step",
        *("num_nodes", "ranks_per_gpu", "threads_per_rank", "variant"),
    },
    "driver/derived.py": {"device_memory_gib", "fit", "num_nodes", "ranks_per_gpu", "single_step"},
    "driver/record_check.py": {"world", "fit", "num_nodes", "packing", "timed_steps", "warmup_steps"},
    # where ranks are started, and by what
    "driver/attempt.py": {"world"},
    "driver/campaign.py": set(),
    "driver/notes.py": {  # doubts about trials, and which pack a line is about
        *("device_memory_gib", "document_lens", "env", "optimizer_offload", "packing", "ranks_per_gpu", "seed"),
        "threads_per_rank",
    },
    "driver/launch.py": {"num_nodes"},
    "cluster/packs.py": {"num_nodes"},
    "driver/searching.py": {"device_memory_gib"},  # what a plan without GPUs counts on
    "cluster/submission.py": {"num_nodes"},
    "driver/ranks.py": {"allocator", "env", "num_nodes", "ranks_per_gpu", "threads_per_rank"},
    "driver/sweep.py": {"document_len", "document_lens", "packing"},  # @FILE; which lengths a search may have
    "look/pack.py": {"packing"},  # the word is of rows that go into one file
    "driver/overrides.py": {"link", "env", "own"},
    "look/methods_table.py": {"layout", "ulysses_degree", "variant"},
    "measure/cuda_graph.py": {"launch"},
    "measure/timing.py": {"launch", "single_step", "timed_steps", "warmup_steps"},
    "measure/record.py": {"world", "env", "num_nodes"},
    # what a trial is called: the layout is part of a method's name
    "driver/progress.py": {"fit", "layout", "placement"},
    "look/doctor.py": {"exchange"},
    "rows/row.py": {"exchange", "timed_steps"},
    "rows/names.py": {"dkv_dtype", "packing", "seed"},
    "predict/advice.py": {"activation_checkpointing", "loss_tile_tokens", "ulysses_degree"},  # what it recommends
    "report/cards.py": {"isolation"},
    "analysis/cells.py": {"device_memory_gib", "fit", "launch", "micro_batches", "seed"},
    "analysis/documents.py": {"seed"},  # which documents are drawn
    "analysis/fabric_model.py": {"exchange"},
    "analysis/ladder.py": {
        *("activation_checkpointing", "allocator", "learning_rate", "masked_label_share", "max_grad_norm"),
        *("model_code", "optimizer"),
    },
    "analysis/limits.py": {"device_memory_gib", "fit", "ranks_per_gpu"},  # fit: a trial that asks how long it can get
    "analysis/longest.py": {"allocator", "model_code"},  # which move the edge of memory
    # whose schedule and amounts are predicted
    "predict/projection.py": {
        *("checkpoint_offload", "loss_tile_tokens", "mlp_tile_tokens", "model_code", "optimizer_offload"),
        *("activation_checkpointing", "device_memory_gib", "dkv_dtype", "exchange", "head_chunks", "head_stride"),
        *("hidden_size", "intermediate_size", "layout", "num_layers", "packing", "placement"),
        "single_step",  # whose peak may lack the moments
    },
    "report/figures/steps.py": {"activation_checkpointing"},  # what cannot be told apart where a step recomputes
    "report/figures/style.py": {"exchange", "head_chunks", "head_stride", "layout"},
    "report/figures/traffic.py": {"batch_size", "variant"},
    "analysis/losses.py": {"seed", "warmup_steps"},
    "analysis/overlap.py": {"head_chunks", "head_stride"},
    "report/packed_gate.py": {"layout", "masked_label_share", "variant"},
    "analysis/pattern_bytes.py": {"activation_checkpointing", "num_layers", "ulysses_degree", "variant"},
    "report/published.py": {"optimizer_offload"},
    "analysis/rivals.py": {"layout", "placement"},
    "analysis/scaling.py": {"num_nodes"},  # one GPU is of one host
    "analysis/series.py": {
        "link",
        "world",
        "single_step",  # a name of its own
        "fit",
        "activation_checkpointing",
        "backward_prefetch",
        "batch_size",
        "checkpoint_offload",
        "device_memory_gib",
        "exchange",
        "forward_prefetch",
        "isolation",
        "launch",
        "layout",
        "loss_tile_tokens",
        "micro_batches",
        "mlp_tile_tokens",
        "model_code",
        "num_layers",
        "num_nodes",
        "optimizer_offload",
        "placement",
        "ranks_per_gpu",
        "reduce_gradients",
        "reshard_after_forward",
        "seed",
        "variant",
    },
    "analysis/settings.py": {"variant"},
    "analysis/signs.py": {"isolation"},
    "analysis/time_parts.py": {"device_memory_gib"},
    "analysis/words.py": {
        "link",
        "world",
        *("allocator", "loss_tile_tokens", "mlp_tile_tokens"),  # heads of columns
        *("document_len", "document_lens", "document_sigma", "masked_label_share"),
        "activation_checkpointing",
        "batch_size",
        "checkpoint_offload",
        "device_memory_gib",
        "dkv_dtype",
        "exchange",
        "fit",  # and single_step: flags
        "single_step",
        "head_chunks",
        "head_stages",
        "head_stride",
        "inner_ring_degree",
        "isolation",
        "layout",
        "merge_dtype",
        "model_code",
        "num_layers",
        "optimizer_offload",
        "packing",
        "placement",
        "ranks_per_gpu",
        "seed",
        "variant",
    },
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


def test_an_option_is_named_by_its_declaration_and_its_uses_alone():
    package = Path(sp_bench.__file__).parent
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        if file.parts[0] in IMPLEMENTS or file.as_posix() == "config/trial.py":
            continue
        says = named(path)
        options = {
            option.column or option.name
            for option in OPTIONS
            if {option.path, option.column, f"{option.group or 'config'}.{option.name}"} & says
        }
        assert options - AXES <= USES.get(file.as_posix(), set()), f"{file} can take its options from OPTIONS"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.path)
def test_an_option_is_used_can_be_set_and_is_tested(option):
    package, conf = Path(sp_bench.__file__).parent, conf_folder()
    uses = [p for folder in IMPLEMENTS for p in (package / folder).rglob("*.py")]
    uses += [package / file for file in USES] + [package / "worker.py", package / "driver" / "identity.py"]
    uses.append(package / "config" / "documents.py")  # what a shape is made of
    files = (conf / option.group).glob("*.yaml") if option.group else [conf / "config.yaml"]
    word = re.compile(rf"\b{option.name}\b")
    assert any(word.search(path.read_text()) for path in uses)
    assert any(option.name in yaml.safe_load(path.read_text()) for path in files) or option.path == "method.own"
    assert any(word.search(path.read_text()) for path in Path(__file__).parents[1].rglob("test_*.py"))
