import json
import re
import subprocess
import sys
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_bench import hardware
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError, parse
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory
from sp_bench.costs.memory.fsdp2 import WORKSPACES_BYTES
from sp_bench.costs.training import block_shapes, num_parameters
from sp_bench.driver import notes, ranks
from sp_bench.methods import double_ring
from sp_bench.planning import plan
from sp_bench.planning.overrides import choices
from sp_bench.rows.row import asked_for


def test_planning_imports_no_torch(make_config):
    code = (
        "import json, sys\n"
        "from sp_bench.planning import plan\n"
        "from sp_bench.config.trial import TrialConfig\nfrom sp_bench.config.parsing import parse\n"
        "config = parse(TrialConfig, json.load(sys.stdin))\n"
        "assert len(plan.plan([config], 3, 0, None)) == 3\n"
        "assert not {'torch', 'hydra', 'deepspeed', 'flash_attn'} & set(sys.modules), sorted(sys.modules)\n"
    )
    config = plan.canonical(make_config(method="usp"))
    done = subprocess.run([sys.executable, "-c", code], input=config, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_key_order_does_not_change_the_identity(make_config):
    config = make_config()
    backwards = parse(TrialConfig, dict(reversed(config.to_mapping().items())))
    assert plan.cell_id(backwards) == plan.cell_id(config)


def test_the_canonical_config_reads_back_as_the_same_config(make_config):
    config = make_config(method="usp", workload="train_step", hardware__device_memory_gib=40.0)
    assert parse(TrialConfig, json.loads(plan.canonical(config))) == config


def test_an_option_that_is_none_is_left_out_of_the_identity(make_config):
    assert "null" not in plan.canonical(make_config())
    assert "head_stride" not in plan.canonical(make_config(method="all_gather"))


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 4096},
        {"sp_size": 4},
        {"batch_size": 2},
        {"dtype": "bfloat16"},
        {"seed": 1},
        {"kernel": "math"},
        {"model__head_dim": 32},
        {"workload__timed_steps": 11},
        {"workload__pass_kind": "forward"},
        {"fabric__name": "slow"},
        {"hardware__name": "laptop"},
        {"hardware__device_memory_gib": 40.0},
        {"method": "ring"},
    ],
)
def test_whatever_changes_what_is_measured_changes_the_cell(make_config, change):
    assert plan.cell_id(make_config(**change)) != plan.cell_id(make_config())


def test_identities_have_the_documented_form(make_config):
    (trial,) = plan.plan([make_config()], 1, 0, None)
    for identity in (trial.cell_id, trial.trial_id):
        assert len(identity) == 12
        assert set(identity) <= set("0123456789abcdef")
    assert trial.cell_id != trial.trial_id


def test_equal_configs_are_one_cell(make_config):
    assert len(plan.plan([make_config(), make_config(), make_config(sp_size=4)], 1, 0, None)) == 2


@settings(max_examples=30)
@given(cells=st.integers(1, 8), replicates=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_replicates_form_randomised_complete_blocks(make_config, cells, replicates, seed):
    configs = [make_config(seq_len=64 * n) for n in range(1, cells + 1)]
    trials = plan.plan(configs, replicates, seed, None)
    assert trials == plan.plan(configs, replicates, seed, None)
    assert [t.order_index for t in trials] == list(range(cells * replicates))
    assert len({t.trial_id for t in trials}) == len(trials)
    for block in range(replicates):
        part = trials[block * cells : (block + 1) * cells]
        assert {t.replicate for t in part} == {block}
        assert len({t.cell_id for t in part}) == cells


def test_the_order_differs_between_blocks_and_between_seeds(make_config):
    configs = [make_config(seq_len=64 * n) for n in range(1, 13)]
    order = [t.cell_id for t in plan.plan(configs, 2, 0, None)]
    assert order[:12] != order[12:]
    assert order != [t.cell_id for t in plan.plan(configs, 2, 1, None)]


def test_heads_that_cannot_be_split_are_unsupported_with_the_sizes_that_work_while_ring_runs(make_config):
    heads = {"model__num_heads": 32, "model__num_kv_heads": 8, "sp_size": 3, "seq_len": 6144}
    reason = plan.unsupported_reason(make_config(method="ulysses", **heads), None)
    assert reason is not None
    assert "num_heads=32" in reason
    assert "1, 2, 4, 8, 16, 32" in reason
    assert plan.unsupported_reason(make_config(method="ring", **heads), None) is None


def test_a_length_that_cannot_be_cut_is_unsupported_with_the_nearest_lengths(make_config):
    reason = plan.unsupported_reason(make_config(method="ring", sp_size=4, seq_len=6145), None)
    assert reason is not None
    assert "6144 or 6152" in reason


def test_a_training_step_pads_the_length_that_attention_refuses(make_config):
    config = make_config(method="ring", sp_size=4, seq_len=6145, workload="train_step")
    assert plan.unsupported_reason(config, None) is None


def test_a_kernel_of_another_device_is_unsupported(make_config):
    reason = plan.unsupported_reason(make_config(kernel="cudnn"), None)
    assert reason is not None
    assert "CUDA" in reason


def test_options_that_no_shape_makes_valid_are_an_error_and_not_a_row(make_config):
    with pytest.raises(ConfigError, match=r"method\.layout=zigzag: ulysses"):
        plan.plan([make_config(method__layout="zigzag")], 1, 0, None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"fabric": "nvlink"}, "meet by sockets, not over fabric=nvlink; use fabric=socket"),
        ({"num_nodes": 2}, "is for one host"),
        ({"hardware__ranks_per_gpu": 1}, "need 4 CUDA devices; 2 here"),
        ({"workload": "collective"}, "nothing else"),
    ],
)
def test_ranks_that_share_gpus_need_fewer_and_meet_by_sockets(make_config, changed, said):
    asked = {"kernel": "cudnn", "fabric": "socket", "hardware": "h200", "hardware__ranks_per_gpu": 2, "sp_size": 4}
    config = make_config(method="ring", **asked | {"dtype": "bfloat16"} | changed)
    reason = plan.unsupported_reason(config, num_gpus=2, num_hosts=None)
    assert reason is None if said is None else said in (reason or "")
    if not changed:
        assert (config.gpus_per_node, config.is_timed) == (2, False)
        variables = [ranks._place(config, rank, rank) for rank in range(4)]
        assert [of_rank["LOCAL_RANK"] for of_rank in variables] == ["0", "0", "1", "1"]
        assert len({(of_rank["LOCAL_RANK"], of_rank["NCCL_HOSTID"]) for of_rank in variables}) == 4


@pytest.mark.parametrize(("num_gpus", "expected"), [(None, "no NVIDIA driver here"), (2, "2 here"), (4, None)])
def test_too_few_gpus_are_named_before_anything_is_launched(make_config, num_gpus, expected):
    config = make_config(kernel="cudnn", hardware="h200", fabric="nvlink", dtype="bfloat16", sp_size=4)
    reason = plan.unsupported_reason(config, num_gpus)
    assert reason is None if expected is None else expected in str(reason)


def test_a_cpu_trial_asks_for_no_gpu(make_config):
    assert plan.unsupported_reason(replace(make_config(), sp_size=4), None) is None


def test_a_trial_over_two_hosts_needs_half_of_its_gpus_on_each_and_no_copy_engines(make_config):
    over_two = {"method": "ring", "sp_size": 16, "num_nodes": 2, "seq_len": 16384, "hardware": "h200"}
    over_two |= {"fabric": "network", "kernel": "cudnn", "dtype": "bfloat16"}
    config = make_config(**over_two)
    assert plan.unsupported_reason(config, 8, num_hosts=2) is None
    assert "need 8 CUDA devices of each; 4 here" in plan.unsupported_reason(config, 4, num_hosts=2)
    assert "torchrun --nnodes=2" in plan.unsupported_reason(config, 8)
    engines = make_config(**over_two, method__exchange="copy_engines")
    assert "of one host, not to num_nodes=2" in plan.unsupported_reason(engines, 8, num_hosts=2)


FABRICS_WITHOUT_PEER_ACCESS = ("gloo", "shm", "socket", "channels_1", "channels_2")


def test_every_other_fabric_than_those_with_nvlink_is_known_here():
    assert {*FABRICS_WITHOUT_PEER_ACCESS, "nvlink", "network"} == set(choices("fabric"))


@pytest.mark.parametrize("workload", ["attention", "collective"])
@pytest.mark.parametrize("method", ["ulysses", "ring", "all_gather"])
@pytest.mark.parametrize("fabric", FABRICS_WITHOUT_PEER_ACCESS)
def test_copy_engines_are_not_said_to_go_over_a_fabric_that_they_pass_by(make_config, fabric, method, workload):
    chosen = {"method": method, "workload": workload, "fabric": fabric, "method__exchange": "copy_engines"}
    gpu = {"kernel": "cudnn", "hardware": "h200", "dtype": "bfloat16"} if fabric != "gloo" else {}
    reason = plan.unsupported_reason(make_config(**chosen, **gpu), 8)
    assert reason is not None
    assert f"fabric={fabric};" in reason
    assert "use fabric=nvlink, or method.exchange=collectives" in reason
    for way_out in ({"fabric": "nvlink"}, {"method__exchange": "collectives"}) if gpu else ():
        assert plan.unsupported_reason(make_config(**{**chosen, **gpu, **way_out}), 8) is None


HEADS = st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(1, 6))


@pytest.mark.parametrize("method", ["ulysses", "usp"])
@settings(max_examples=40)
@given(sizes=HEADS)
def test_every_number_of_head_chunks_that_a_refusal_lists_is_accepted_and_no_other(make_config, method, sizes):
    degree, kv_heads, group = sizes
    num_heads = degree * kv_heads * group  # what a rank has: kv_heads, and `group` query heads of each
    heads = {"model__num_heads": num_heads, "model__num_kv_heads": degree * kv_heads, "sp_size": degree}
    if method == "usp":
        heads["method__ulysses_degree"] = degree
    heads["seq_len"] = 64 * degree

    def reason_of(chunks):
        return plan.unsupported_reason(make_config(method=method, method__head_chunks=chunks, **heads), None)

    def listed(reason):
        return {int(n) for n in re.search(r"use one of \{(.*)\}", reason)[1].split(", ")}

    most = num_heads // degree
    reasons = {chunks: reason_of(chunks) for chunks in range(1, most + 2)}  # one more than heads never fits
    refused = {chunks: reason for chunks, reason in reasons.items() if reason}
    assert most + 1 in refused
    for chunks, reason in refused.items():
        assert f"method.head_chunks={chunks} " in reason
        assert f"{most} query and {kv_heads} key/value heads" in reason
        assert listed(reason) == reasons.keys() - refused.keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"method": "upipe", "method__head_stages": 3, "model__num_heads": 8, "model__num_kv_heads": 4},
            "method.head_stages=3 does not cut a rank's 4 query and 2 key/value heads; use one of {1, 2, 4}",
        ),
        ({"method": "upipe", "model__num_heads": 9, "model__num_kv_heads": 3}, "num_heads=9 cannot be split over"),
        (
            {"method": "double_ring", "method__inner_ring_degree": 4, "sp_size": 6, "seq_len": 1536},
            "method.inner_ring_degree=4 does not divide sp_size=6; use one of 1, 2, 3, 6",
        ),
    ],
)
def test_upipe_and_the_double_ring_refuse_with_the_numbers_that_work(make_config, options, said):
    assert said in str(plan.unsupported_reason(make_config(**{"sp_size": 2, "seq_len": 1024} | options), None))


@pytest.mark.parametrize(("sp_size", "inner"), [(1, 1), (2, 2), (3, 3), (4, 2), (6, 3), (8, 4), (12, 4), (16, 4)])
def test_the_inner_rings_of_a_double_ring_are_no_smaller_than_their_number(sp_size, inner):
    assert double_ring.inner_ring_degree(MethodConfig("double_ring"), sp_size) == inner
    assert double_ring.inner_ring_degree(MethodConfig("double_ring", inner_ring_degree=1), sp_size) == 1


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"sp_size": 8}, (4, 2)),
        ({"sp_size": 8, "method__inner_ring_degree": 2}, (2, 4)),
        ({"sp_size": 2}, (2, 1)),
        ({"sp_size": 8, "workload": "collective"}, (None, None)),
    ],
)
def test_a_row_says_the_sizes_of_both_rings_as_they_are(make_config, options, sizes):
    config = make_config(method="double_ring", **options)
    columns = asked_for(config, plan.resolve(config))
    assert (columns["inner_ring_degree"], columns["outer_ring_degree"]) == sizes
    ring = make_config(method="ring", sp_size=8)
    columns = asked_for(ring, plan.resolve(ring))
    assert (columns["inner_ring_degree"], columns["outer_ring_degree"]) == (None, None)


def test_parts_share_a_kv_head_under_ulysses_and_not_around_a_ring(make_config):
    chunks = {"model__num_heads": 8, "model__num_kv_heads": 2, "sp_size": 2, "method__head_chunks": 4}
    assert plan.unsupported_reason(make_config(method="ulysses", **chunks), None) is None
    reason = plan.unsupported_reason(make_config(method="usp", method__ulysses_degree=2, **chunks), None)
    assert reason is not None
    assert "use one of {1}" in reason


def test_what_cannot_fit_the_host_is_unsupported_with_both_numbers_and_the_way_out(make_config):
    config = make_config(seq_len=2**30)  # 8 query and 8 KV heads of 64, in float32
    reason = plan.unsupported_reason(config, None, 2**34)
    heads, kv_heads, head_dim = config.model.num_heads, config.model.num_kv_heads, config.model.head_dim
    per_token = (4 * heads + 4 * kv_heads) * head_dim * 4
    assert reason == (
        f"inputs, outputs and gradients of all ranks take {per_token:,.1f} GiB of host memory; this machine has 16.0 "
        f"GiB; use less than seq_len={2**34 // per_token}"
    )
    assert plan.unsupported_reason(replace(config, seq_len=2**34 // per_token // 4 * 4), None, 2**34) is None


def test_a_trial_on_gpus_runs_whatever_it_holds_and_the_plan_warns(make_config):
    gpu = {"kernel": "cudnn", "hardware": "h200", "fabric": "nvlink", "dtype": "bfloat16", "model": "llama3_8b"}
    configs = [make_config(seq_len=seq_len, **gpu) for seq_len in (2**24, 2**12)]
    trials = plan.plan(configs, 1, 0, 2, host_bytes=2**30)
    assert [trial.unsupported_reason for trial in trials] == [None, None]
    (warning,) = notes.warnings(trials, 64, 140 * 2**30)
    assert warning.startswith("1 of 2 cells will probably end as oom: a rank needs up to ")


@pytest.mark.parametrize("engine", ["hf_deepspeed", "trl_sft", "megatron"])
def test_the_plan_warns_of_steps_that_the_memory_model_puts_above_the_device(make_config, engine):
    gpu = {"kernel": "cudnn", "hardware": "h200", "fabric": "nvlink", "dtype": "bfloat16", "model": "qwen3_4b"}
    step = gpu | {"workload": "train_step", "workload__activation_checkpointing": "full", "sp_size": 1}
    configs = [make_config(engine=engine, method="single", seq_len=seq_len, **step) for seq_len in (2**20, 2**12)]
    trials = [replace(trial, unsupported_reason=None) for trial in plan.plan(configs, 1, 0, 2)]  # with the libraries
    found = notes.warnings(trials, 64, 140 * 2**30)
    needed = memory.peak(configs[0]).bytes / 2**30
    assert [f"up to {needed:,.1f} GiB, by the memory model" in each for each in found] == [True]
    assert found[0].startswith("1 of 2 cells")


def test_an_optimizer_in_host_memory_must_fit_it(make_config):
    gpu = {"hardware": "h200", "fabric": "nvlink", "dtype": "bfloat16", "model": "llama3_8b", "workload": "train_step"}
    config = make_config(engine="deepspeed", engine__optimizer_offload="torch_adamw", **gpu)
    needed = memory.held_on_host_bytes(config)
    # Of each of 2 ranks: fp32 parameters and moments; gradients of 4 groups of 10^9 parameters and of 15 million; their
    # sums in one buffer; a group's new parameters. What is page-locked, gradients and sums, is a power of 2.
    mine = num_parameters(config.model) // 2
    assert needed == 2 * (12 * mine + 4 * 2**32 + 2**26 + 2**33 + 2 * 10**9)
    assert memory.held_on_host_bytes(make_config(engine="deepspeed", **gpu)) == 0


def test_fsdp2_offloads_gradients_too_and_checkpoints_must_fit_the_host(make_config):
    gpu = {"hardware": "h200", "fabric": "nvlink", "dtype": "bfloat16", "model": "qwen3_4b", "workload": "train_step"}
    gpu["kernel"] = "cudnn"
    offloaded = make_config(engine__optimizer_offload="torch_adamw", **gpu)
    # Of each of 2 ranks: moments as they are; parameters and gradients page-locked, each as a power of 2. In a layer q
    # and the output's matrix are 20 MiB of a rank, k and v 5, those of the MLP 47.5; the embedding is 742.
    layer = 2 * (32 + 8) * 2**20 + 3 * 64 * 2**20 + 2 * 8192 + 2 * 256
    locked = 36 * layer + 1024 * 2**20 + 8192
    assert memory.held_on_host_bytes(offloaded) == 8 * num_parameters(offloaded.model) + 2 * 2 * locked
    long = make_config(
        **gpu, seq_len=65536, workload__activation_checkpointing="full", workload__checkpoint_offload=True
    )
    needed = 35 * 65536 * 2560 * 2  # of all ranks: the inputs of all layers but the last
    assert memory.held_on_host_bytes(long) == needed
    with_processes = needed + 2 * memory.PROCESS_BYTES
    reason = plan.unsupported_reason(long, 2, with_processes - 1)
    assert reason is not None
    assert reason.startswith("offloaded checkpoints, processes together take 13.7 GiB of host memory; this machine has")
    assert plan.unsupported_reason(long, 2, with_processes) is None
    both = replace(long, engine=offloaded.engine)
    reason = plan.unsupported_reason(both, 2, 2**34)
    assert reason is not None
    assert reason.startswith("parameters, gradients, optimizer states, offloaded checkpoints, processes together take ")


def test_the_memory_model_follows_what_is_offloaded(make_config):
    gpu = {"hardware": "h200", "fabric": "nvlink", "dtype": "bfloat16", "model": "qwen3_4b", "workload": "train_step"}
    long = gpu | {"seq_len": 65536, "workload__activation_checkpointing": "full", "workload__loss_tile_tokens": 2048}
    plain, checkpoints, optimizer = (
        memory.peak(make_config(**long, **options))
        for options in ({}, {"workload__checkpoint_offload": True}, {"engine__optimizer_offload": "torch_adamw"})
    )
    layer = 32768 * 2560 * 2
    assert plain.loss - checkpoints.loss == 35 * layer
    assert plain.last_layer - checkpoints.last_layer == 34 * layer
    assert plain.update - checkpoints.update == 0
    state = num_parameters(make_config(**gpu).model) * 4 / 2  # fp32, of one of two ranks
    assert plain.last_layer - optimizer.last_layer == 3 * state
    block = sum(map(prod, block_shapes(make_config(**gpu).model).values()))
    head, norm = 151936 * 2560, 2560  # the head is the embedding too
    # whole parameters, gradients of both as made, and the first layer's in fp32; and cuBLAS' work space
    assert optimizer.reduce == 2 * (3 * head + norm) + 4 * block + WORKSPACES_BYTES
    assert plain.reduce == 4 * state - 4 * (head + norm) / 2 + optimizer.reduce  # its part of the sum is not there yet
    assert optimizer.update == WORKSPACES_BYTES


def test_more_ranks_than_processors_is_a_warning(make_config):
    trials = plan.plan([make_config(sp_size=4), make_config(sp_size=2)], 1, 0, None)
    (warning,) = notes.warnings(trials, 2, None)
    assert warning.startswith("1 of 2 cells have up to 4 ranks on 2 processors")
    assert notes.warnings(trials, 4, None) == []


def test_variables_of_the_shell_that_shape_messages_are_a_warning(make_config):
    """A fabric's own win over the shell's, and are in its name."""
    gpu, cpu = make_config(hardware="h200", fabric="nvlink", dtype="bfloat16", kernel="cudnn"), make_config()
    shell = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "1", "NCCL_DEBUG": "INFO", "HOME": "/"}
    (warning,) = notes.inherited([gpu, gpu], shell)
    assert warning.startswith("ranks inherit NCCL_P2P_DISABLE=1, which no fabric of these trials sets")
    assert notes.inherited([cpu], shell) == notes.inherited([gpu], {"NCCL_NVLS_ENABLE": "1"}) == []


def test_an_optimizer_in_host_memory_with_one_thread_is_a_warning(make_config, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    gpu = {"hardware": "h200", "fabric": "nvlink", "dtype": "bfloat16", "kernel": "cudnn", "workload": "train_step"}
    plain = make_config(**gpu, sp_size=2)
    slow = replace(plain, engine=replace(plain.engine, optimizer_offload="torch_adamw"))
    fast = replace(slow, hardware=replace(slow.hardware, threads_per_rank=8))
    assert notes.slow_updates([plain, fast]) == []
    (warning,) = notes.slow_updates([plain, fast, slow])
    assert warning.startswith(
        "1 of 3 configurations update their parameters on the host, where each rank has one thread"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert notes.slow_updates([slow]) == []


@pytest.mark.parametrize(
    ("version", "warned"), [("4.0.0b29", False), ("4.0.0b30", True), ("4.0.0", True), (None, False)]
)
def test_the_plan_warns_of_a_library_that_computes_another_attention(make_config, monkeypatch, version, warned):
    packages = {} if version is None else {"flash-attn-4": version}
    monkeypatch.setattr(hardware, "package_versions", lambda: packages)
    gpu = {"hardware": "h200", "fabric": "nvlink", "dtype": "bfloat16", "model": "llama3_8b", "sp_size": 2}
    theirs = gpu | {"method": "transformer_engine"}
    configs = [make_config(kernel=kernel, **theirs) for kernel in ("flash_attn_4", "cudnn")]
    trials = [replace(trial, unsupported_reason=None) for trial in plan.plan(configs, 1, 0, 2)]
    assert [f"flash-attn-4 {version} computes another" in each for each in notes.warnings(trials, 64, None)] == (
        [True] if warned else []
    )


def test_the_warm_up_of_a_single_step_must_end_in_time_too(make_config):
    gpu = {"kernel": "cudnn", "hardware": "h200", "fabric": "nvlink", "dtype": "bfloat16", "model": "qwen3_4b"}
    single = {"workload": "train_step", "workload__single_step": True, "workload__timed_steps": 1, "seq_len": 2**19}
    config = make_config(workload__warmup_steps=1, **gpu, **single)
    (trial,) = plan.plan([config], 1, 0, 2, device_name="NVIDIA H200", measure_s=10_000, warmup_s=300)
    assert "1 step before it would take about" in str(trial.unsupported_reason)
    assert "deadlines.warmup=300; use " in str(trial.unsupported_reason)
    (trial,) = plan.plan([config], 1, 0, 2, device_name="NVIDIA H200", measure_s=10_000, warmup_s=1000)
    assert trial.unsupported_reason is None
