"""A link file made from collective rows is what one real rank can run with."""

from pathlib import Path

import pytest
import yaml

from sp_bench.config.machine import LinkConfig
from sp_bench.config.parsing import ConfigError, parse
from sp_bench.costs.links import curve_problem
from sp_bench.report import link_file

from .rows import collective, commit

RESULTS = Path(__file__).parents[2] / "results"


def link(folders, path="ours.yaml"):
    return parse(LinkConfig, yaml.safe_load(link_file.text(folders, Path(path))))


def messages(fabric, primitive, *us: float, **columns):
    return collective(fabric, primitive, 10, **columns) | {"curve": curve(*us)}


def curve(*us: float):
    return [{"message_bytes": 2**20 * 4**n, "ms": each / 1e3} for n, each in enumerate(us)]


def test_committed_rows_give_the_points_of_the_committed_link():
    found = link([RESULTS / "h200x2_fabrics"], "nvlink.yaml")
    kept = yaml.safe_load((RESULTS.parent / "conf/link/nvlink.yaml").read_text())
    assert curve_problem(found) is None
    for key, text in kept["inside"].items():
        made = [tuple(map(float, point.split(":"))) for point in found.inside[key].split()]
        for size, us in (tuple(map(float, point.split(":"))) for point in text.split()):
            assert dict(made)[size] == pytest.approx(us, rel=2e-3), key


def test_messages_that_wait_for_the_host_are_left_out_and_rows_are_their_median(tmp_path):
    rows = [messages("nvlink", "all_gather", 50, 90, 100 + n, 400, replicate=n) for n in range(3)]
    assert link([commit(rows, tmp_path / "a")]).inside == {"all_gather 8": "16777216:101 67108864:400"}


def test_seconds_are_written_without_an_exponent(tmp_path):
    found = link([commit([messages("gloo", "all_gather", 100, 4_620_604.04)], tmp_path / "a")])
    assert found.inside == {"all_gather 8": "1048576:100 4194304:4620604"}
    assert curve_problem(found) is None


def test_between_hosts_bytes_are_those_of_one_card(tmp_path):
    rows = [
        messages("network", primitive, 100, 400, sp_size=16, num_nodes=2)
        for primitive in ("all_to_all", "send_recv", "all_gather")
    ]
    found = link([commit(rows, tmp_path / "a")])
    assert found.inside == {}
    sizes = {key: float(text.split(":")[0]) for key, text in found.between.items()}
    assert sizes["send 2"] == 2**20
    assert sizes["all_gather 2"] == 2**20 / 8
    assert sizes["all_to_all 2"] == pytest.approx(2**20 * 8 / 15, abs=1)


def test_what_makes_no_link_is_refused_with_the_way_out(tmp_path):
    rows = [messages(fabric, "all_gather", 100, 400) for fabric in ("nvlink", "shm")]
    folder = commit(rows, tmp_path / "a")
    with pytest.raises(ConfigError, match="fabrics nvlink, shm; name the file as one of them"):
        link([folder])
    assert link([folder], "shm.yaml").name == "shm"
    with pytest.raises(ConfigError, match="lower-case letters"):
        link([folder], "Our link.yaml")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="have none of workload=collective; run one first"):
        link([tmp_path / "empty"])
    one = commit([messages("nvlink", "all_gather", 100)], tmp_path / "b")
    with pytest.raises(ConfigError, match="run larger ones too"):
        link([one])
