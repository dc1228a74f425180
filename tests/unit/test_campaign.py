import itertools
import os
import re
import signal
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest

from sp_bench import hardware
from sp_bench.config.parsing import ConfigError
from sp_bench.costs import memory
from sp_bench.driver import campaign, devices, to_run
from sp_bench.driver.signals import Interrupted, Signals
from sp_bench.hardware import Gpu, Gpus
from sp_bench.planning import identity, plan
from sp_bench.planning.plan import Trial
from sp_bench.planning.search import Search
from sp_bench.planning.settings import CampaignConfig, DeadlinesConfig, SearchConfig
from sp_bench.rows import store
from sp_bench.rows.store import STATUSES, RowName


def settings(**changes):
    default = {"campaign": "c", "results_root": "r", "replicates": 1, "order_seed": 0, "max_points": 1}
    default |= {"deadlines": DeadlinesConfig(1, 1, 1, 1), "plan_only": False, "resume": True, "max_attempts": 3}
    return CampaignConfig(**default | changes)


def row(status, attempt=0):
    return RowName("a" * 12, "0" * 8, attempt, status)


def trial(reason=None):
    return Trial(None, "c" * 12, "a" * 12, 0, 0, reason)


@pytest.mark.parametrize("status", STATUSES)
def test_resume_retries_preempted_timeout_and_error_and_run_nothing(status):
    again = 1 if status in ("preempted", "timeout", "error") else None
    planned = trial("sp_size=3 does not divide 8 heads" if status == "unsupported" else None)
    assert to_run.next_attempt(row(status), planned, settings()) == again
    assert to_run.next_attempt(row(status), planned, settings(resume=False)) is None


@pytest.mark.parametrize("resume", [False, True])
def test_what_was_refused_runs_once_nothing_refuses_it(resume):
    assert to_run.next_attempt(row("unsupported", 3), trial(), settings(resume=resume)) == 4


def test_what_its_own_ranks_refused_does_not_run_again_and_the_plan_says_so(make_config, tmp_path, capsys):
    asked = settings(results_root=str(tmp_path), plan_only=True)
    configs = [make_config(seq_len=n) for n in (96, 192, 384)]
    planned, env_id = plan.plan(configs, 1, 0, None), identity.env_id(configs[0])
    (tmp_path / "c").mkdir()
    for trial, phase in zip(planned[:2], ("plan", "correctness"), strict=True):
        name = {"trial_id": trial.trial_id, "env_id": env_id, "attempt": 0, "status": "unsupported"}
        store.write(name | {"phase": phase, "reason": "use a workload.learning_rate of 1e-05"}, tmp_path / "c")
    states = to_run.states(planned, campaign.Campaign(asked, tmp_path / "c", None, None))
    assert [state.done for state in states] == [None, "unsupported", None]
    campaign.run(configs, asked, reporter=Mock())
    assert "done: unsupported, by its own ranks, which would refuse the same code and options" in (
        printed := capsys.readouterr().out
    )
    assert "3 trials: 1 done, 2 to run" in printed


@pytest.mark.parametrize(
    ("kind", "names", "plan_only", "expected"),
    [
        ("h200", ("NVIDIA H200", "NVIDIA H200"), False, None),
        ("h200", ("NVIDIA A100-SXM4-80GB",), False, "this machine has NVIDIA A100-SXM4-80GB"),
        ("h200", ("NVIDIA A100-SXM4-80GB",), True, "this machine has NVIDIA A100-SXM4-80GB"),
        ("h200", None, False, "no NVIDIA driver here"),
        ("h200", None, True, None),
    ],
)
def test_the_hardware_that_rows_name_is_what_the_machine_has(make_config, kind, names, plan_only, expected):
    config = make_config(hardware=kind, fabric="nvlink", dtype="bfloat16", kernel="cudnn")
    found = None if names is None else Gpus("580", tuple(Gpu(name, f"GPU-{n}") for n, name in enumerate(names)))
    with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
        campaign.require_devices([config], found, settings(plan_only=plan_only))


def test_a_plan_for_the_cpu_and_gpus_runs_where_there_are_none(make_config):
    gpu = make_config(hardware="h200", fabric="nvlink", dtype="bfloat16", kernel="cudnn")
    assert campaign.require_devices([make_config(), gpu], None, settings()) is None


@pytest.mark.parametrize("resume", [False, True])
def test_what_has_no_row_is_attempt_0(resume):
    assert to_run.next_attempt(None, trial(), settings(resume=resume)) == 0


def test_rows_of_another_environment_are_named_before_their_trials_run_again(make_config, tmp_path, capsys):
    configs = [make_config(seq_len=96), make_config(seq_len=192)]
    asked = settings(results_root=str(tmp_path), plan_only=True)
    campaign.run(configs, asked, reporter=Mock())
    assert "measured before" not in capsys.readouterr().out
    (tmp_path / "c").mkdir()
    first = plan.plan(configs, 1, 0, None)[0].trial_id
    second = plan.plan(configs, 1, 0, None)[1].trial_id
    (tmp_path / "c" / RowName(second, identity.env_id(configs[0]), 0, "ok").file_name).touch()
    for env_id in ("0" * 8, "1" * 8):
        (tmp_path / "c" / RowName(first, env_id, 0, "ok").file_name).touch()
    campaign.run(configs, asked, reporter=Mock())
    assert "1 trial of 1 to run had been measured before, but with other libraries" in capsys.readouterr().out


def test_a_search_with_checkpoints_in_host_memory_starts_from_what_of_it_is_free(
    make_config, monkeypatch, tmp_path, capsys
):
    """Ranks and other programs have some of it already, and a rank that finds too little ends its trial."""
    options = {"activation_checkpointing": "selective", "checkpoint_offload": True, "loss_tile_tokens": 2048}
    config = make_config(
        **{f"workload__{name}": value for name, value in options.items()},
        workload="train_step",
        model="qwen3_4b",
        kernel="cudnn",
        hardware="h200",
        fabric="nvlink",
        dtype="bfloat16",
    )
    two = Gpus("580", tuple(Gpu("NVIDIA H200", f"GPU-{n}", 140 * 2**30, (9, 0)) for n in range(2)))
    monkeypatch.setattr(hardware, "gpus", lambda: two)
    monkeypatch.setattr(hardware, "host_bytes", lambda: 252 * 2**30)

    def start(free_gib):
        monkeypatch.setattr(hardware, "free_host_bytes", lambda: free_gib * 2**30)
        asked = SearchConfig(resolution=0.04, max_probes=16, start=None, longest=None)
        campaign.run([], settings(results_root=str(tmp_path), plan_only=True, search=asked), Mock(), [Search(config)])
        (tokens,) = re.findall(r"from ([\d,]+) tokens", capsys.readouterr().out)
        return int(tokens.replace(",", ""))

    less = start(free_gib=230)
    assert less < start(free_gib=252)
    assert memory.held_on_host_bytes(replace(config, seq_len=less)) < 230 * 2**30


def test_attempts_are_bounded():
    numbers = [to_run.next_attempt(row("error", n), trial(), settings(max_attempts=4)) for n in range(5)]
    assert numbers == [1, 2, 3, None, None]


def test_the_latest_attempt_speaks_for_its_trial():
    rows = [row("timeout"), row("error", 2), row("preempted", 1)]
    for order in itertools.permutations(rows):
        (latest,) = store.latest(order).values()
        assert latest == row("error", 2)


def test_the_first_signal_waits_until_it_is_asked_for_and_ctrl_c_after_it_does_not():
    before = signal.getsignal(signal.SIGINT)
    with Signals() as signals:
        signals.check()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.taken_away == "SIGTERM"
        with pytest.raises(Interrupted, match="SIGTERM"):
            signals.check()
        if before is not signal.SIG_IGN:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            signals.check()
    finally:
        signal.signal(signal.SIGHUP, before)


class Enough(Exception):
    pass


def stop():
    raise Enough


def test_a_device_is_measured_on_by_one_run_at_a_time_and_who_waits_says_so_and_can_be_stopped(monkeypatch):
    monkeypatch.setenv(devices.SCOPE, f"one-test-{os.getpid()}")
    said = []
    with devices.reserved(["cpu"], stop, said.append):
        assert said == []
        with pytest.raises(Enough), devices.reserved(["gpu1", "cpu"], stop, said.append):
            pytest.fail("reserved twice")
        assert "another run is measuring on this machine" in said[0]
        with devices.reserved(["gpu1", "gpu0"], stop, said.append):
            pass
    with devices.reserved(["cpu"], stop, said.append):
        assert len(said) == 1
