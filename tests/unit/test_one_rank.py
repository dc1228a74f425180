"""What one rank may stand for, what proves it, and what its rows say, before anything runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sp_bench.attention.layouts import SequenceLayout, causal_pairs_of_ranks
from sp_bench.config.machine import LinkConfig
from sp_bench.config.options import canonical
from sp_bench.config.parsing import ConfigError, parse
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.links import MessageTime, curve_problem, message_time
from sp_bench.methods import real_rank
from sp_bench.planning import overrides, plan, proofs, sweep
from sp_bench.planning.overrides import conf_folder
from sp_bench.rows import names, store
from sp_bench.rows.row import asked_for

RESULTS = Path(__file__).parents[2] / "results"
LINKS = sorted(path.stem for path in (conf_folder() / "link").glob("*.yaml"))


def link_of(name: str) -> LinkConfig:
    return parse(LinkConfig, yaml.safe_load((conf_folder() / "link" / f"{name}.yaml").read_text()))


def test_a_world_of_real_ranks_keeps_its_identity_and_one_rank_has_its_own(make_config):
    ranks, one = make_config(), make_config(world="one_rank")
    assert "world" not in canonical(ranks)
    assert "link" not in canonical(ranks)
    assert plan.cell_id(one) != plan.cell_id(ranks)
    assert plan.cell_id(one) != plan.cell_id(make_config(world="one_rank", link="nvlink"))


def test_one_process_on_one_host_stands_for_all(make_config):
    config = make_config(world="one_rank", sp_size=16, num_nodes=2)
    assert (config.num_processes, config.num_hosts, config.processes_per_host) == (1, 1, 1)
    assert (config.world_size, config.ranks_per_node) == (16, 8)
    row = asked_for(config, plan.resolve(config))
    assert (row["evidence"], row["world_size"], row["ranks_per_node"]) == ("one_rank", 16, 8)
    on_gpu = make_config(world="one_rank", sp_size=16, num_nodes=2, hardware="h200", fabric="network")
    assert on_gpu.gpus_per_node == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"link": "nvlink"}, "link=nvlink is of a world of one rank"),
        ({"real_rank": 1}, "real_rank=1 is of a world of one rank"),
        ({"world": "one_rank", "real_rank": 2}, "the world has ranks 0 to 1"),
    ],
)
def test_options_of_one_rank_without_it_are_refused(make_config, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        make_config(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sp_size": 1}, "of 1 rank sends nothing"),
        ({"workload": "parity"}, "compares ranks"),
        ({"workload": "collective"}, "compares ranks"),
        ({"method": "transformer_engine", "kernel": "cudnn"}, "method=transformer_engine was not tried with one rank"),
        ({"workload": "train_step", "engine": "megatron"}, "engine=megatron was not tried with one rank"),
        ({"method": "deepspeed_ulysses", "sp_size": 3, "model__num_kv_heads": 4}, "gives ranks of deepspeed_ulysses"),
    ],
)
def test_what_one_rank_cannot_stand_for_is_unsupported(make_config, changes, reason):
    assert reason in (plan.unsupported_reason(make_config(world="one_rank", **changes), None) or "")


PACKED = {"workload__packing": "fixed", "workload__document_len": 768, "seq_len": 4096, "kernel": "math"}


@pytest.mark.parametrize(
    ("changes", "is_lower_bound"),
    [
        ({"method__layout": "contiguous"}, True),
        ({"method__layout": "striped"}, True),
        (PACKED, True),
        (PACKED | {"workload__window": 100, "method__layout": "contiguous"}, True),
        ({"workload__window": 64, "real_rank": 0}, True),  # it has the first tokens, which see less
        ({}, False),
        ({"method__layout": "contiguous", "workload__causal": False}, False),
        ({"workload__window": 64}, False),
        (PACKED | {"method": "ulysses"}, False),
        (PACKED | {"method__layout": "document_zigzag"}, False),
        ({"method__layout": "contiguous", "world": "ranks"}, False),
    ],
)
def test_one_rank_of_uneven_ones_runs_as_a_lower_bound(make_config, changes, is_lower_bound):
    config = make_config(**{"world": "one_rank", "method": "ring", "sp_size": 4, "kernel": "math"} | changes)
    assert plan.unsupported_reason(config, None) is None
    assert real_rank.is_lower_bound(config) == is_lower_bound


def test_the_real_rank_is_the_one_with_the_most_work(make_config):
    def place(**changes):
        return real_rank.real_place(make_config(world="one_rank", sp_size=4, seq_len=4096, kernel="math", **changes))

    fit = {"workload": "train_step", "workload__single_step": True, "workload__fit": True, "workload__timed_steps": 1}
    ring, packed = {"method": "ring"}, {"workload__packing": "fixed", "workload__document_len": 1024}
    assert place() == place(**ring) == place(**ring, workload__causal=False, method__layout="contiguous") == 0
    assert place(**ring, method__layout="contiguous") == place(**ring, method__layout="striped") == 3
    assert place(method="usp", method__ulysses_degree=2, method__layout="contiguous") == 2  # of ranks 2 and 3
    assert place(method="ring", workload__window=64) == 2
    assert place(method="ring", workload__window=3000, method__layout="contiguous") == 3  # the middle one sees less
    pairs = causal_pairs_of_ranks(
        SequenceLayout("zigzag", 4), make_config(**ring, seq_len=4096, **packed).documents(4096)
    )
    assert place(**ring, **packed) == pairs.index(max(pairs))
    assert place(**ring, **fit) == 3  # of equals it holds most
    assert place(**ring, real_rank=1) == place(**ring, **fit, real_rank=1) == 1
    assert real_rank.real_place(make_config()) is None


# the link model


@pytest.mark.parametrize("name", LINKS)
def test_a_links_curves_are_curves(name):
    assert curve_problem(link_of(name)) is None


@pytest.mark.parametrize("text", ["", "0:1", "0:5 10:1", "a:1 2:3", "0:1 0:2"])
def test_what_is_no_curve_is_named(text):
    assert "link.inside['send 2']" in (curve_problem(LinkConfig("x", {"send 2": text})) or "")


LINK = LinkConfig(
    "x",
    {"all_to_all 2": "0:10 1000:110", "send 2": "0:10 1000:110", "all_gather 4": "0:0 1000:100"},
    {"all_to_all 2": "0:50 1000:1050", "send 2": "0:50 1000:1050", "all_gather 2": "0:50 1000:1050"},
)


@pytest.mark.parametrize(
    ("op", "members", "sent", "us"),
    [
        ("all_to_all", range(4), 1000, (100, 0, 10)),  # one node: the curve of fewer ranks
        ("all_to_all", range(8), 700, (30, 400, 50)),  # 4 of 7 parts to the other node, 3 beside it
        ("send", range(8), 1000, (0, 1000, 50)),  # a ring is as slow as its slowest hop
        ("send", range(4), 2000, (210, 0, 10)),  # beyond the curve at the rate of its end
        ("all_gather", range(8), 1000, (100, 250, 50)),  # through the cards of all 4 ranks of a node
        ("reduce_scatter", range(4), 1000, (100, 0, 0)),  # as all_gather
        ("all_to_all", [0, 4], 1000, (0, 1000, 50)),  # one rank a node
    ],
)
def test_a_message_takes_what_its_collective_group_and_nodes_say(op, members, sent, us):
    found = message_time(LINK, op, sent, list(members), 4)
    assert tuple(1e6 * seconds for seconds in found) == pytest.approx(us)


def test_no_link_takes_no_time_and_an_unknown_collective_is_an_error():
    assert message_time(LinkConfig(), "send", 1e9, [0, 1], 2) == MessageTime(0, 0, 0)
    with pytest.raises(ConfigError, match="says nothing of gather among 2 ranks"):
        message_time(LINK, "gather", 1e9, [0, 1], 2)


# what proves it


def row_of(config: TrialConfig, folder: Path, status: str = "ok") -> None:
    identity = {"trial_id": names.trial_id(plan.cell_id(config), 0), "env_id": "01234567", "attempt": 0}
    reason = None if status == "ok" else "of this test"
    store.write({"status": status, "reason": reason} | identity | asked_for(config, plan.resolve(config)), folder / "c")


def test_an_ok_row_of_real_ranks_with_equal_options_is_a_proof(make_config, tmp_path):
    one = make_config(world="one_rank", sp_size=8, method="ring")
    assert proofs.missing_reason(make_config(), tmp_path) is None
    (tmp_path / "c").mkdir()
    for other in (
        make_config(sp_size=2, method="ulysses"),
        make_config(sp_size=2, method="ring", method__dkv_dtype="float32"),
        make_config(sp_size=2, method="ring", kernel="math"),
        make_config(sp_size=2, method="ring", dtype="float64"),
        make_config(world="one_rank", sp_size=2, method="ring"),
        make_config(sp_size=1, method="ring"),
    ):
        row_of(other, tmp_path)
    row_of(make_config(sp_size=2, method="ring"), tmp_path, "error")
    reason = proofs.missing_reason(one, tmp_path) or ""
    assert "sp-bench run method=ring kernel=cpu_flash" in reason
    row_of(proof := make_config(sp_size=4, method="ring", seq_len=4096), tmp_path)
    assert proofs.missing_reason(one, tmp_path) is None
    assert proofs.find(one, tmp_path) == f"c/{names.trial_id(plan.cell_id(proof), 0)}-01234567"


def test_no_kernel_of_delta_layers_is_the_chunked_one_and_each_proves_the_other(make_config, tmp_path):
    options = {"workload": "train_step", "model": "qwen3_next_dense", "method": "ulysses", "method__states": "gather"}
    for folder, held, asked in (("null", None, "chunked"), ("chunked", "chunked", None)):
        (tmp_path / folder / "c").mkdir(parents=True)
        row_of(make_config(sp_size=2, kernel__delta=held, **options), tmp_path / folder)
        one = make_config(world="one_rank", sp_size=8, kernel__delta=asked, **options)
        assert proofs.missing_reason(one, tmp_path / folder) is None
        assert proofs.missing_reason(replace(one, kernel=replace(one.kernel, delta="fla")), tmp_path / folder)


@pytest.mark.parametrize(
    ("name", "cells"),
    [("one_rank_held", 53), ("one_rank_map", 40), ("one_rank_libraries", 18), ("h200x2_one_rank", 27)],
)
def test_all_cells_of_our_sweeps_are_proven_by_committed_rows_and_can_run(name, cells):
    configs, _ = sweep.configs(overrides.read_arguments([f"sweep={name}"]))
    assert len(configs) == cells
    for config in configs:
        assert proofs.missing_reason(config, RESULTS) is None, json.loads(canonical(config))
        assert plan.reason_anywhere(config) is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"workload__window": 512, "method__layout": "contiguous"},
        {"model": "deepseek_v2_lite", "kernel": "math", "method__sends": "latent"},
        {"workload": "train_step", "model__layers": "window+full", "model__window": 512},
        {"workload": "train_step", "model": "deepseek_v2_lite_dense", "kernel": "math", "method__sends": "latent"},
        {"workload": "train_step", "model": "qwen3_next_dense", "method": "ulysses", "method__states": "gather"},
    ],
)
def test_the_command_that_a_missing_proof_names_makes_it(make_config, tmp_path, changes):
    one = make_config(world="one_rank", sp_size=8, seq_len=8192, **{"method": "ring"} | changes)
    (tmp_path / "c").mkdir()
    reason = proofs.missing_reason(one, tmp_path) or ""
    ((proving,), _) = sweep.configs(overrides.read_arguments(reason.split("sp-bench run ")[1].split()))
    assert plan.reason_anywhere(proving) is None
    row_of(proving, tmp_path)
    assert proofs.missing_reason(one, tmp_path) is None


def test_a_step_without_latents_proves_none_with_them_and_the_reverse(make_config, tmp_path):
    step = {"method": "ulysses", "workload": "train_step", "kernel": "math"}
    (tmp_path / "c").mkdir()
    row_of(make_config(**step, sp_size=2), tmp_path)
    one = make_config(**step, world="one_rank", sp_size=8)
    latents = make_config(**step, world="one_rank", sp_size=8, model="deepseek_v2_lite_dense")
    assert [proofs.find(config, tmp_path) is None for config in (one, latents)] == [False, True]


@pytest.mark.parametrize(
    ("name", "proofs_and_cells"),
    [
        ("one_rank_hybrid", (6, 18)),
        ("one_rank_latent", (12, 126)),
        ("one_rank_delta", (4, 29)),
        ("one_rank_hybrid_delta", (3, 12)),
        ("one_rank_edges", (10, 20)),
        ("one_rank_latent_steps", (4, 24)),
    ],
)
def test_the_first_commands_in_a_sweep_prove_all_of_its_cells(tmp_path, name, proofs_and_cells):
    lines = (conf_folder() / "sweep" / f"{name}.yaml").read_text().splitlines()
    *first, last = (line.split()[3:] for line in lines if line.startswith("#   sp-bench run "))
    proving = [config for words in first for config in sweep.configs(overrides.read_arguments(words))[0]]
    cells, _ = sweep.configs(overrides.read_arguments(last))
    assert (len(proving), len(cells)) == proofs_and_cells
    assert all(plan.reason_anywhere(config) is None for config in (*proving, *cells))
    (tmp_path / "c").mkdir()
    for config in proving:
        row_of(config, tmp_path)
    for config in cells:
        assert proofs.missing_reason(config, tmp_path) is None, json.loads(canonical(config))
