from datetime import UTC, datetime

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.driver import attempt
from sp_bench.driver.claims import Claims
from sp_bench.driver.progress import Progress
from sp_bench.driver.signals import Signals
from sp_bench.planning import plan
from sp_bench.planning.settings import CampaignConfig, DeadlinesConfig
from sp_bench.rows import schema, store
from sp_bench.rows.row import Outcome

from .rows import asked_for

ROW = {"status": "ok", "trial_id": "0123456789ab", "env_id": "01234567", "attempt": 0}


def test_every_type_of_column_survives_the_trip_through_a_file(tmp_path):
    environment = {field.name: None for field in schema.ENVIRONMENT} | {"packages": [("torch", "2.13")]}
    samples = {
        schema.TEXT: "text",
        schema.INT: 2**40,
        schema.REAL: 1.5,
        schema.FLAG: True,
        schema.TIME: datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        pa.list_(schema.TEXT): ["a", "b"],
        pa.list_(schema.REAL): [1.0, 2.0],
        schema.PER_RANK_INT: [1, 2],
        schema.PER_RANK_STEP: [[1.0, 2.0], [3.0]],
        schema.TENSOR_ERRORS: {"output": 1e-7, "dq": 1e-7, "dk": None, "dv": 0.5},
        schema.PARAMETER_ERROR: {"parameter": "norm.weight", "error": 1e-7, "budget": 3e-5},
        schema.IDENTITY_ERRORS: {"sum_dv": 1e-7, "sum_dk": 1e-7, "q_dq": None, "v_dv": 0.5},
        schema.COMM: [
            {"phase": "forward", "op": "send", "calls": 3, "predicted_bytes": 16 / 3, "counted_bytes": 16 / 3}
        ],
        schema.CURVE: [{"message_bytes": 65536, "ms": 0.02}],
        schema.DEVICE_STATE: [
            {field.name: None for field in schema.DEVICE_STATE.value_type}
            | {"sm_clock_mhz": 1980, "power_w": 612.5, "throttle_reasons": ["sw_power_cap"]},
        ],
        schema.STAGE_ENDS: [{field.name: 2 for field in schema.STAGE_ENDS.value_type}],
        schema.BATCHES: [{field.name: [2] if field.name == "groups" else 2 for field in schema.BATCHES.value_type}],
        schema.STAGE_TIMES: [{field.name: 0.5 for field in schema.STAGE_TIMES.value_type}],
        schema.STEP_PARTS: [{"forward": 1.5, "recompute": 0.0, "backward": 2.5, "optimizer": 0.5}],
        schema.KERNEL_PARTS: [{field.name: 0.5 for field in schema.KERNEL_PARTS.value_type}],
        schema.PHASE_ENDS: [{"forward": 2**40, "backward": 3, "optimizer": 2}],
        schema.PEAK_PARTS: [{field.name: 2**40 for field in schema.PEAK_PARTS.value_type}],
        pa.map_(schema.TEXT, schema.REAL): [("init", 1.0)],
        schema.LAUNCHES: [("flash_fwd", 8)],
        schema.ENVIRONMENT: environment,
        pa.list_(schema.ENVIRONMENT): [environment, environment],
    }
    row = {column.name: samples[column.type] for column in schema.COLUMNS} | ROW | {"reason": None}
    store.write(row, tmp_path)
    table, problems = store.read(tmp_path)
    assert problems == []
    (found,) = table.to_pylist()
    assert found == row | {"schema_version": store.SCHEMA_VERSION, "digest": found["digest"]}


def test_pandas_reads_a_campaigns_folder_with_its_work_beside_the_rows(tmp_path):
    store.write(ROW, tmp_path)
    store.write(ROW | {"status": "oom", "reason": "2 GiB", "trial_id": "ba9876543210"}, tmp_path)
    (tmp_path / store.WORK).mkdir()
    (tmp_path / store.WORK / "rank0.log").write_text("not parquet")
    frame = pd.read_parquet(tmp_path)
    assert sorted(frame["status"]) == ["ok", "oom"]
    assert list(frame.columns) == store.SCHEMA.names


def test_every_column_has_a_doc_and_the_schema_its_version(tmp_path):
    assert all(column.doc for column in schema.COLUMNS)
    assert len({column.name for column in schema.COLUMNS}) == len(schema.COLUMNS)
    written = pq.read_schema(store.write(ROW, tmp_path))
    assert written.metadata[b"sp_bench.schema_version"] == str(store.SCHEMA_VERSION).encode()


@given(
    trial_id=st.text("0123456789abcdef", min_size=12, max_size=12),
    env_id=st.text("0123456789abcdef", min_size=8, max_size=8),
    attempt_number=st.integers(0, 10**6),
    status=st.sampled_from(store.STATUSES),
)
def test_a_file_name_tells_what_it_was_made_of(tmp_path_factory, trial_id, env_id, attempt_number, status):
    folder = tmp_path_factory.mktemp("rows")
    name = store.RowName(trial_id, env_id, attempt_number, status)
    (folder / name.file_name).touch()
    assert list(store.committed(folder)) == [name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1}, "no such columns: speed"),
        ({"status": "fine"}, "status 'fine'; use one of"),
        ({"reason": "why"}, "status ok with reason 'why'"),
        ({"status": "error"}, "status error with reason None"),
    ],
)
def test_a_row_that_contradicts_the_schema_is_not_written(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        store.write(ROW | change, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_corrupt_and_foreign_files_are_named_and_skipped(tmp_path):
    store.write(ROW, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{'a' * 12}-{'b' * 8}-0-ok.parquet").write_bytes(b"PAR1 truncated")
    table, problems = store.read(tmp_path)
    assert table.num_rows == 1
    assert len(problems) == 2
    assert any("notes.txt" in line for line in problems)
    assert any("aaaaaaaaaaaa" in line for line in problems)


def test_a_column_of_a_newer_schema_is_named_and_left_out_and_a_missing_one_is_null(tmp_path):
    path = store.write(ROW, tmp_path)
    table = pq.read_table(path).drop_columns(["method"]).append_column("novelty", pa.array([1]))
    pq.write_table(table, path)
    read, (problem,) = store.read(tmp_path)
    assert "novelty" in problem
    assert read["method"].to_pylist() == [None]


def test_an_interrupted_write_leaves_no_row_and_no_litter(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.write(ROW, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workload", ["attention", "train_step"])
def test_an_unsupported_trial_becomes_a_row_that_says_what_was_asked_for_and_why_not(make_config, tmp_path, workload):
    config = make_config(method="usp", workload=workload, sp_size=3, method__ulysses_degree=2)
    (planned,) = plan.plan([config], 1, 7, None)
    settings = CampaignConfig("c", str(tmp_path), 1, 7, DeadlinesConfig(1, 1, 1, 1), False, 3, False, 1)
    campaign = attempt.Campaign(settings, tmp_path, "f" * 40, True)
    with Claims(campaign.work / "claims") as claims:
        driver = attempt.Driver(campaign, claims, Signals(), Progress([planned]), ())
        refused = attempt.Attempt(planned, "01234567", 0)
        assert attempt.refuse(refused, driver)
        assert not attempt.refuse(refused, driver)  # it has its row
    ((row,), problems) = (store.read(tmp_path)[0].to_pylist(), store.read(tmp_path)[1])
    assert problems == []
    assert (row["status"], row["phase"], row["trial_id"]) == ("unsupported", "plan", planned.trial_id)
    assert "ulysses_degree=2 does not divide sp_size=3" in row["reason"]
    assert (row["method"], row["sp_size"], row["order_seed"], row["git_dirty"]) == ("usp", 3, 7, True)
    assert row["median_step_ms"] is None
    assert row["num_layers"] == (None if workload == "attention" else 2)


def test_a_run_says_once_that_a_gpu_is_slow(make_config, capsys):
    planned = plan.plan([make_config(seq_len=n) for n in (256, 512, 1024)], 1, 7, None)
    progress = Progress(planned)
    for trial, flags in zip(planned, ([], ["transient", "thermal_slowdown"], ["thermal_slowdown"]), strict=True):
        progress.finish(trial, Outcome("ok", "done", measured={"median_step_ms": 3.0, "flags": flags}))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("flag thermal_slowdown: a GPU that NVML reports in thermal slowdown; every step waits")


def test_the_columns_that_say_what_was_asked_for_are_columns_of_the_schema(make_config):
    changes = {"dp_replicate_size": 2, "dp_shard_size": 3, "workload__warmup_steps": 5, "workload__timed_steps": 7}
    config = make_config(method="ring", workload="train_step", sp_size=4, seq_len=1001, **changes)
    asked = asked_for(config)
    assert set(asked) <= set(store.SCHEMA.names)
    assert (asked["seq_len"], asked["padded_seq_len"], asked["ring_degree"]) == (1001, 1008, 4)
    assert (asked["dp_replicate_size"], asked["dp_shard_size"], asked["world_size"]) == (2, 3, 24)
    assert (asked["warmup_steps"], asked["timed_steps"]) == (5, 7)
