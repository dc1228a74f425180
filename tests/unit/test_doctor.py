"""Which fabrics `doctor --curves` measures here, and what it shows of their rows."""

import pytest

from sp_bench import hardware
from sp_bench.driver import campaign
from sp_bench.look import doctor
from sp_bench.planning import identity, overrides, sweep
from sp_bench.rows import store

from .rows import ENV_ID, row


def gpus(*names: str) -> hardware.Gpus:
    return hardware.Gpus("1.0", tuple(hardware.Gpu(name, f"GPU-{i}") for i, name in enumerate(names)))


@pytest.mark.parametrize("found", [None, gpus(), gpus("NVIDIA H200")])
def test_without_two_gpus_the_fabric_is_gloo_on_the_cpu(monkeypatch, found):
    monkeypatch.setattr(hardware, "gpus", lambda: found)
    lines = doctor.fabrics_here()
    assert {"sweep=fabrics", "fabric=gloo", "hardware=cpu", "sp_size=2"} <= set(lines)
    overrides.read_arguments(lines)


@pytest.mark.parametrize(
    ("names", "kind", "sizes"),
    [
        (["NVIDIA H200"] * 2, "h200", "2"),
        (["NVIDIA H200"] * 6, "h200", "2,4"),
        (["NVIDIA H100 80GB HBM3"] * 8, "h100", "2,4,8"),
        (["NVIDIA B200"] * 2, "b200", "2"),
        (["NVIDIA GB200"] * 2, "nvidia_gb200", "2"),
        (["NVIDIA RTX 6000 Ada Generation"] * 2, "nvidia_rtx_6000_ada_generation", "2"),
    ],
)
def test_gpus_are_measured_over_all_fabrics_at_each_power_of_two_under_their_own_name(monkeypatch, names, kind, sizes):
    monkeypatch.setattr(hardware, "gpus", lambda: gpus(*names))
    lines = doctor.fabrics_here()
    assert lines == ["sweep=fabrics", "hardware=device", f"sp_size={sizes}"]
    configs, _ = sweep.configs(overrides.read_arguments(lines))
    assert {config.hardware.name for config in configs} == {kind}
    assert hardware.describes(kind, names[0])


def test_a_peak_rate_that_no_datasheet_told_is_said_once(monkeypatch, capsys):
    found = gpus(*["NVIDIA RTX 6000 Ada Generation"] * 2)
    monkeypatch.setattr(hardware, "gpus", lambda: found)
    words = (
        "hardware=device",
        "fabric=nvlink",
        "kernel=cudnn",
        "dtype=bfloat16",
        "seq_len=4096,8192",
        "plan_only=true",
    )
    campaign.run(*sweep.configs(overrides.read_arguments(words)), None)
    said = capsys.readouterr().out
    assert said.count("no peak rate of NVIDIA RTX 6000 Ada Generation in bfloat16 is known: mfu and hfu are null") == 1


def curve(fabric: str, **columns):
    made = {
        "workload": "collective",
        "pass_kind": "exchange",
        "fabric": fabric,
        "primitive": "all_to_all",
        "latency_us": 12.5,
        "bandwidth_bytes_per_s": 3.0 * 2**30,
        "curve": [{"message_bytes": 2**16, "ms": 0.1}, {"message_bytes": 2**20, "ms": 1000 / 2**11}],
    }
    return row(**(made | columns))


def test_curves_of_this_environment_are_shown_and_a_dash_is_what_the_times_cannot_tell(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(identity, "core_id", lambda device: ENV_ID)
    folder = tmp_path / "fabrics"
    folder.mkdir()
    for made in (
        curve("shm"),
        curve("nvlink", latency_us=None),
        curve("socket", status="error", median_ms=1.0),
        curve("old", env_id="01234567"),
        row(fabric="gloo"),
    ):
        store.write(made, folder)
    doctor.show_curves(folder)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[0] for line in lines] == ["nvlink", "shm", "socket"]
    assert lines[0][1:] == ["all_to_all", "float32", "2", "-", "3.00", "1.00", "2.00", "ok"]
    assert lines[1][4] == "12.5"
    assert lines[2][4:] == ["-", "-", "-", "-", "error:", "made", "up:", "error"]


def test_a_campaign_of_ones_own_is_where_its_curves_are_read(tmp_path, capsys):
    doctor.show_curves(tmp_path / "mine")
    assert len(capsys.readouterr().out.splitlines()) == 1  # the heading: nothing was measured
