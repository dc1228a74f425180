import math
import os
from collections.abc import Sequence

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sp_bench.config.parsing import ConfigError, parse
from sp_bench.config.trial import TrialConfig
from sp_bench.planning import overrides, sweep
from sp_bench.planning.settings import CampaignConfig


def points(blocks, *cells, max_points=2000):
    return sweep.expand(sweep.merge_blocks(blocks, cells), max_points)


def test_a_command_line_is_a_product():
    expanded = points([], "method=ring,usp", "sp_size=2,4", "seq_len=1024")
    assert len(expanded) == 4
    assert {"method": "usp", "sp_size": 4, "seq_len": 1024} in expanded


def test_a_sweep_file_is_a_union_of_products():
    blocks = [{"method": "ring", "sp_size": [2, 4]}, {"method": ["ulysses", "usp"], "seq_len": "range(1024,4096,1024)"}]
    assert len(points(blocks)) == 2 + 2 * 3


def test_a_key_of_the_command_line_replaces_that_key_in_every_block():
    blocks = [{"method": "ring", "seq_len": [1, 2]}, {"method": "usp", "seq_len": [3]}]
    assert points(blocks, "seq_len=8") == [{"method": "ring", "seq_len": 8}, {"method": "usp", "seq_len": 8}]


def test_a_method_of_the_command_line_replaces_the_blocks_options_of_a_method_too():
    blocks = [{"method": "ring", "method.layout": ["zigzag", "striped"], "sp_size": 2}]
    assert points(blocks, "method=ulysses") == [{"sp_size": 2, "method": "ulysses"}]


def test_a_gpu_of_the_command_line_leaves_the_blocks_allocator_and_cap_as_they_are():
    options = {"hardware.allocator": "expandable_segments", "hardware.device_memory_gib": 79.6}
    (point,) = points([{"hardware": "h200", **options}], "hardware=h100", "hardware.device_memory_gib=null")
    assert point == {
        "hardware": "h100",
        "hardware.allocator": "expandable_segments",
        "hardware.device_memory_gib": None,
    }


def asked(*words: str) -> list[TrialConfig]:
    return sweep.read(overrides.read_arguments(words)).configs


@pytest.mark.parametrize(
    ("only", "kept"),
    [
        (["method=ring"], lambda trial: trial.method.name == "ring"),
        (["method=ring,ulysses", "sp_size=4"], lambda t: t.method.name in ("ring", "ulysses") and t.sp_size == 4),
        (["seq_len=range(512,1025,512)"], lambda trial: trial.seq_len in (512, 1024)),
        (["method=glob(*_gather)"], lambda trial: trial.method.name == "all_gather"),
        (["method.layout=zigzag,contiguous"], lambda trial: trial.method.layout != "striped"),
        (["method.ulysses_degree=null"], lambda trial: trial.method.ulysses_degree is None),
        (["workload.optimizer=adamw"], lambda trial: trial.workload.name == "train_step"),  # its file's own value
    ],
)
def test_only_the_part_of_a_sweep_that_has_the_values_runs(only, kept):
    everything = asked("sweep=smoke")
    part = asked("sweep=smoke", *(f"only.{line}" for line in only))
    assert part == list(filter(kept, everything))
    assert 0 < len(part) < len(everything)


def test_only_sees_what_the_command_line_replaced():
    assert {trial.seq_len for trial in asked("sweep=smoke", "seq_len=512,4096", "only.seq_len=4096")} == {4096}
    searched = sweep.read(overrides.read_arguments(["seq_len=64,max", "search.longest=4096", "only.seq_len=max"]))
    assert (len(searched.configs), len(searched.searches)) == (0, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["only.method=upsp"], "did you mean usp"),
        (["only.sq_len=1"], "sq_len is not a field; did you mean seq_len"),
        (["only.seq_len"], "expected key=value"),
        (["only.seq_len=7,512"], r"^only.seq_len=7,512: of these 45 trials seq_len is 1024, 2048, 1536, 512, never 7$"),
        (["only.seq_len=range(1,9)"], "^only.seq_len=range.*, never 1, 2, 3, 4, 5, 6, 7, 8$"),
        (["only.method=usp", "only.sp_size=1"], r"^only.method=usp only.sp_size=1 leaves nothing: none of these 45"),
        (["only.sp_size=true"], "only.sp_size=true: of these .*, never true$"),
        (["only.sp_size='2'"], "never '2'$"),
        (["only.method=[ring]"], r"^only.method=\[ring\]: .* use only.method=ring$"),
        (["only.method.name=ring"], "^only.method.name=ring: choose it with only.method=ring$"),
        (["only.method=ring,"], "^only.method=ring,: a value is missing"),
        (["only.seq_len=range(1,1e11)"], "99,999,999,999 values, more than max_points=2000"),
        (["only.method.layout=glob(zig*)"], r"^only.method.layout=glob.* has no value; a glob chooses names"),
        (["only.campaign=smoke"], "only.campaign=smoke: campaign holds for the whole run"),
        (["only.sp_size=2", "only.sp_size=4"], r"only.sp_size is given 2 times; use only.sp_size=2,4$"),
        (["only.seq_len=interval(1,2)"], "an interval has no points"),
        (["only.seq_len=${oc.env:HOME}"], "no interpolation"),
    ],
)
def test_a_part_that_cannot_be_is_refused_by_name(words, message):
    with pytest.raises(ConfigError, match=message):
        asked("sweep=smoke", *words)


def test_a_part_has_numbers_of_equal_value():
    capped = ["hardware=h200", "fabric=nvlink", "hardware.device_memory_gib=79.5,80"]
    (trial,) = asked(*capped, "only.hardware.device_memory_gib=80.0")
    assert trial.hardware.device_memory_gib == 80


def test_one_configuration_has_no_part():
    with pytest.raises(ConfigError, match=r"^only.seq_len=64: --cfg job shows one configuration"):
        overrides.read_arguments(["--cfg", "job", "only.seq_len=64"])


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("seq_len=range(1,1e9)", "999,999,999"),
        ("seq_len=range(0,100000000000000000000)", "100,000,000,000,000,000,000"),
        ("seed=range(3000,0,-1)", "3,000"),
        ("seed=shuffle(range(1,1e9))", "999,999,999"),
    ],
)
def test_an_absurd_range_is_refused_by_its_count_before_it_is_expanded(line, count):
    with pytest.raises(ConfigError, match=f"the sweep has {count} points, more than max_points=2000; insist with"):
        points([], line)


def test_insisting_on_a_large_sweep_works():
    assert len(points([], "seed=range(0,2500)", max_points=2500)) == 2500


@given(start=st.integers(-50, 50), stop=st.integers(-50, 50), step=st.integers(-7, 7).filter(bool))
def test_the_count_of_a_range_is_the_number_of_its_values(start, stop, step):
    (override,) = overrides.parse_overrides([f"seed=range({start},{stop},{step})"])
    assert overrides.count_values(override) == len(overrides.values(override))


@given(start=st.integers(-20, 20), tenths=st.integers(0, 99))
def test_the_count_of_a_fractional_range_is_exact(start, tenths):
    (override,) = overrides.parse_overrides([f"workload.learning_rate=range({start},{start + tenths / 10:.1f},0.25)"])
    assert overrides.count_values(override) == math.ceil(tenths / 2.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "method=ulyses",
            "method=ulyses: did you mean ulysses\\? method is one of all_gather, deepspeed_ulysses",
        ),
        ("kernel=cudn", "did you mean cudnn"),
        ("model=llama3", "did you mean llama3_8b"),
        ("workload=train", "workload is one of attention"),
        ("fabric=nvlnk", "did you mean nvlink"),
        ("hardware=h20", "did you mean h200"),
        ("sweep=smok", "did you mean smoke"),
        ("method=range(1,3)", "give names"),
        ("method=[ring,usp]", "no brackets here; use method=ring,usp"),
        ("sq_len=5", "did you mean seq_len\\? sp-bench run --cfg job shows the fields of a run, and with method=NAME"),
        ("method.layuot=zigzag", "did you mean method.layout"),
        ("deadlines=5", "deadlines is not a field"),
        ("method.name=ring", "choose it with method=ring"),
        ("fabric.env={A:b}", "give these variables a file in conf/fabric"),
        ("+foo=1", "cannot be added or deleted"),
        ("~seed", "cannot be added or deleted"),
        ("++seed=1", "cannot be added or deleted"),
        ("hydra.sweep.dir=x", "Hydra's own settings are fixed"),
        ("hydra/launcher=slurm", "Hydra's own groups are fixed; trials run on this machine only"),
        ("hydra/sweeper=basic", "Hydra's own groups are fixed"),
        ("campaign=${oc.env:HOME}", "no interpolation"),
        ("model.name._target_=os.system", "no _target_"),
        ("seq_len", "expected key=value without spaces"),
        ("sp_size=2,", "sp_size=2,: a value is missing beside a comma; there are no spaces around commas"),
        ("sp_size= ,2", "a value is missing beside a comma"),
        ("sweep=seq_len=512", "a value with = in it needs quotes; is this two words, each key=value"),
        ("campaign=(a", "no such value; use a number, plain text, text in quotes"),
        ("seq_len=range(a,b)", "seq_len=range\\(a,b\\): 'range\\(a,b\\)': mismatch type argument start"),
        ("method@x=ring", "expected key=value"),
        ("seq_len=1,,2", "seq_len=1,,2: a value is missing beside a comma"),
        ("seq_len=interval(1,2)", "an interval has no points"),
        ("seq_len=range(1,9,0)", "a step other than 0"),
        ("seq_len=range(5,1)", "no value to sweep over"),
        ("replicates=1,2", "a run has one replicates"),
        ("--config-dir=/tmp", "is not a flag of run"),
        ("--info", "is not a flag of run"),
    ],
)
def test_a_bad_argument_is_refused_by_name_before_hydra_sees_it(line, message):
    with pytest.raises(ConfigError, match=message):
        points([], *overrides.read_arguments([line]).cells)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=ring", "seed=1", "method=ulysses"], "method=ring method=ulysses: .* use method=ring,ulysses$"),
        (["seq_len=1,2", "seq_len=2", "seq_len=4"], "given 3 times; use seq_len=1,2,4$"),
        (["seq_len=range(1,3)", "seq_len=4"], "give it once$"),
        (["method=ring", "method=ring"], "give it once$"),
        (["campaign=a", "campaign=b"], "give it once$"),
        (["sweep=smoke", "sweep=parity"], "give it once$"),
    ],
)
def test_a_key_that_is_given_twice_is_refused_with_the_way_to_sweep_over_both(words, message):
    with pytest.raises(ConfigError, match=message):
        overrides.read_arguments(words)


def test_words_of_a_command_stand_back_behind_those_of_its_user():
    lines = overrides.replaced(["sweep=fabrics", "fabric=gloo", "sp_size=2"], ["fabric=shm", "seed=1"])
    assert lines == ["sweep=fabrics", "sp_size=2", "fabric=shm", "seed=1"]


def test_campaign_settings_and_cells_are_told_apart():
    request = overrides.read_arguments(["-m", "method=ring,usp", "campaign=c", "sweep=smoke", "deadlines.init=5"])
    assert request == overrides.Request(["campaign=c", "sweep=smoke", "deadlines.init=5"], ["method=ring,usp"], False)


def test_the_composed_config_can_be_shown():
    assert overrides.read_arguments(["--cfg", "job", "method=ring"]).show_config
    with pytest.raises(ConfigError, match="--cfg job"):
        overrides.read_arguments(["--cfg", "hydra"])


@pytest.mark.parametrize("word", ["method=ring,usp", "seq_len=range(1,9)", "sweep=smoke"])
def test_a_sweep_is_not_shown_as_one_configuration(word):
    with pytest.raises(ConfigError, match="--cfg job shows one configuration and takes no sweeps"):
        overrides.read_arguments(["--cfg", "job", word])


@pytest.mark.parametrize("block", ["ring", [1], {"campaign": "c"}, {"sq_len": 5}])
def test_a_bad_block_is_named_by_its_place(block):
    with pytest.raises(ConfigError, match=r"sweep\.blocks\[1\]"):
        points([{"seq_len": 8}, block])


def test_an_empty_list_in_a_block_is_refused_as_one():
    with pytest.raises(ConfigError, match=r"sweep\.blocks\[0\]: seq_len: an empty list sweeps nothing"):
        points([{"method": "ring", "seq_len": []}])


@given(st.one_of(st.booleans(), st.integers(), st.none(), st.text("abc ,'\"\\[]{}:=", min_size=1)))
def test_a_listed_value_reaches_the_config_as_it_stands(value):
    line = sweep.override_line("results_root", [value])
    if "$" in line:
        return
    (override,) = overrides.parse_overrides([line])
    assert override.value() == value


def test_an_option_that_the_chosen_file_lacks_is_refused_with_those_it_has():
    composed = {"method": {"name": "ring", "layout": "zigzag"}, "seq_len": 8}
    with pytest.raises(ConfigError, match=r"method\.placement: method=ring has no such option; it has method\.layout"):
        sweep.with_options(composed, {"method.placement": "ring_inner"})


def test_options_are_set_on_a_copy():
    composed = {"method": {"name": "ring", "layout": "zigzag"}, "seq_len": 8}
    changed = sweep.with_options(composed, {"method.layout": "striped", "seq_len": 16})
    assert changed == {"method": {"name": "ring", "layout": "striped"}, "seq_len": 16}
    assert composed["seq_len"] == 8


def test_every_sweep_file_has_valid_blocks_and_sets_campaign_fields_only_outside_them():
    for name in overrides.choices("sweep"):
        overrides.check_file("sweep", name)
        content = yaml.safe_load((overrides.conf_folder() / "sweep" / f"{name}.yaml").read_text())
        assert points(content.pop("sweep")["blocks"])
        assert set(content) <= set(CampaignConfig.__annotations__)


DEFAULTS = yaml.safe_load((overrides.conf_folder() / "config.yaml").read_text())
KEYS = (*overrides.CELL_KEYS, *overrides.CAMPAIGN_KEYS, "hydra.run.dir", "method.name", "fabric.env.X", "a", "_target_")
PIECES = (
    *("1", "-1", "0", "2.5", "1e9", "-1e308", "inf", "nan", "null", "true", "0x1", "1_0", "ring"),
    *("range(", "interval(", "choice(", "shuffle(", "sort(", "glob(", "tag(", "int(", "str(", "json_str(", ")", ","),
    *("[", "]", "{", "}", ":", "'", '"', "\\", "\\'", "${", "oc.env:HOME}", "$", "=", "+", "~", "@", "*", "/", ".."),
    *(" ", "\n", "\t", "é", "../../x", "/tmp/x", "-x", "_target_"),
)
VALUES = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
WORDS = st.one_of(
    st.tuples(st.sampled_from(KEYS), VALUES).map("=".join),
    st.tuples(st.sampled_from(("", "+", "++", "~", "-", "--", "hydra.")), st.sampled_from(KEYS), VALUES).map("".join),
    st.text(max_size=40),
)


def campaign_of(words: Sequence[str], trial: dict[str, object]) -> CampaignConfig:
    """The campaign that these words ask for, once all of its trials have been parsed. Without Hydra, for speed."""
    request = overrides.read_arguments(words)
    for point in points([], *request.cells, max_points=50):
        options = {key: value for key, value in point.items() if key not in overrides.GROUPS}
        parse(TrialConfig, sweep.with_options(trial, options))
    changed = {name: DEFAULTS[name] for name in CampaignConfig.__annotations__}
    for override in overrides.parse_overrides(request.campaign):
        if override.key_or_group != "sweep":
            name, *rest = str(override.key_or_group).split(".")
            changed[name] = changed[name] | {rest[0]: override.value()} if rest else override.value()
    return parse(CampaignConfig, changed)


@settings(max_examples=700, suppress_health_check=list(HealthCheck))
@given(words=st.lists(WORDS, min_size=1, max_size=3))
@example(["campaign='../../x'"])
@example(["results_root='a/../../../x'", "campaign=ok"])
def test_any_words_make_a_campaign_below_its_results_root_or_a_config_error(make_config, words):
    try:
        made = campaign_of(words, make_config().to_mapping())
    except ConfigError:
        return
    assert os.path.dirname(os.path.abspath(made.folder)) == os.path.abspath(made.results_root)
    assert str(made.folder).isprintable()
