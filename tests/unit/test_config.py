import json
from dataclasses import fields

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import kernels, methods
from sp_bench.config.engine import EngineConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError, parse
from sp_bench.config.trial import TrialConfig
from sp_bench.planning.overrides import choices, conf_folder
from sp_bench.planning.settings import CampaignConfig, DeadlinesConfig

CAMPAIGN = {
    "campaign": "c",
    "results_root": "results",
    "replicates": 1,
    "order_seed": 0,
    "deadlines": {"init": 1, "correctness": 1, "warmup": 1, "measure": 1},
    "resume": False,
    "max_attempts": 3,
    "plan_only": False,
    "max_points": 10,
}


def test_a_trial_config_survives_the_trip_through_json(make_config):
    config = make_config(method="usp", workload="train_step", sp_size=4)
    assert parse(TrialConfig, json.loads(json.dumps(config.to_mapping()))) == config


def test_auto_times_long_enough_and_never_too_long(make_config):
    workload = make_config(workload__timed_steps="auto", workload__warmup_steps=2).workload
    number = {ms: workload.num_timed_steps(ms) for ms in (0.01, 1.0, 50.0, 249.0, 300.0, 2500.0, 9000.0)}
    assert number == {0.01: 5000, 1.0: 1250, 50.0: 25, 249.0: 6, 300.0: 5, 2500.0: 4, 9000.0: 2}
    assert make_config(workload__timed_steps=7).workload.num_timed_steps(0.01) == 7


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workload__warmup_steps": 1}, "use workload.warmup_steps=2 or more, not 1"),
        ({"workload": "parity"}, "workload parity has a fixed number of steps; use a number, or workload=attention or"),
        ({"workload": "collective"}, "workload collective has a fixed number of steps"),
        (
            {"workload": "train_step", "workload__single_step": True},
            "with timed_steps=auto; it is for .* timed_steps=1",
        ),
        ({"workload__timed_steps": "automatic"}, "must be a whole number in plain digits or auto"),
        ({"workload__timed_steps": None}, "must be a whole number in plain digits or auto"),
        ({"workload__timed_steps": 0}, "workload.timed_steps=0 must be positive"),
    ],
)
def test_a_number_of_timed_steps_that_no_trial_can_have_is_refused(make_config, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        make_config(**{"workload__timed_steps": "auto"} | changes)


def test_every_method_and_kernel_has_its_file_and_every_file_its_code():
    assert set(choices("method")) == set(methods.NAMES)
    assert set(choices("kernel")) == {*kernels.NAMES, *kernels.OF_DELTA}


@pytest.mark.parametrize("group", ["method", "kernel", "model", "workload", "engine", "fabric", "hardware"])
def test_each_file_of_a_group_is_a_valid_config_named_as_its_file(make_config, group):
    for name in choices(group):
        extra = {"hardware": "h200"} if group == "fabric" and name != "gloo" else {}
        if group == "engine":
            extra = {"workload": "train_step"}
        config = make_config(**{group: name}, **extra)
        assert getattr(config, group).name == name


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("gloo", {}),
        ("nvlink", {}),
        ("channels_2", {"NCCL_MAX_NCHANNELS": "2"}),
        ("channels_1", {"NCCL_MAX_NCHANNELS": "1"}),
        ("shm", {"NCCL_P2P_DISABLE": "1"}),
        ("socket", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}),
    ],
)
def test_a_fabric_is_exactly_its_variables_with_multicast_off(make_config, name, env):
    """Without any one of them NCCL takes a faster way, and rows would name a fabric that they did not use."""
    nccl = name != "gloo"
    fabric = make_config(fabric=name, hardware="h200" if nccl else "cpu").fabric
    assert fabric.backend == ("nccl" if nccl else "gloo")
    assert fabric.env == env | ({"NCCL_NVLS_ENABLE": "0"} if nccl else {})


def test_every_fabric_of_nccl_has_multicast_off(make_config):
    for name in set(choices("fabric")) - {"gloo"}:
        assert make_config(fabric=name, hardware="h200").fabric.env["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize("name", methods.NAMES)
def test_a_method_file_holds_only_options_that_the_method_accepts(name):
    method = parse(MethodConfig, yaml.safe_load((conf_folder() / "method" / f"{name}.yaml").read_text()))
    assert methods.get(name).layout(method, 4).kind == method.layout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 0}, "seq_len=0 must be positive"),
        ({"seq_len": -5}, "seq_len=-5 must be positive"),
        ({"seq_len": 2.5}, r"seq_len=2\.5 must be a whole number"),
        ({"seq_len": True}, "seq_len=True must be a whole number"),
        ({"seq_len": "many"}, "seq_len='many' must be a whole number"),
        ({"dtype": "bf16"}, "dtype='bf16': .*use one of"),
        ({"model__num_kv_heads": 3}, r"model\.num_kv_heads=3 does not divide model\.num_heads=8; use one of"),
        ({"method__layuot": "zigzag"}, r"method\.layuot is not a field; did you mean method\.layout\?"),
        ({"workload__pass_kind": "step"}, r"workload\.pass_kind=step does not fit workload attention"),
        ({"dp_shard_size": 2}, "dp_shard_size=2: the attention workload has no data parallelism"),
        ({"fabric": "nvlink"}, "fabric=nvlink needs CUDA devices"),
    ],
)
def test_an_impossible_value_is_refused_by_field_value_and_way_out(make_config, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


@given(name=st.text(max_size=120))
def test_a_campaign_name_never_leaves_its_folder(name):
    try:
        accepted = parse(CampaignConfig, CAMPAIGN | {"campaign": name}).campaign
    except ConfigError:
        return
    assert "/" not in accepted
    assert accepted[0] not in "._-"
    assert len(accepted) <= 100


def test_whole_seconds_are_accepted_as_deadlines():
    assert parse(CampaignConfig, CAMPAIGN).deadlines == DeadlinesConfig(1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(("group", "schema"), [("method", MethodConfig), ("engine", EngineConfig)])
def test_every_option_is_in_some_file_of_its_group_or_nobody_could_set_it(group, schema):
    files = (conf_folder() / group).glob("*.yaml")
    given = {option for file in files for option in yaml.safe_load(file.read_text())}
    assert given == {field.name for field in fields(schema)} - {"own"}  # of methods from outside, which have no file
