"""Rows that contradict themselves, or that changed after they were written, are named and left out."""

import hashlib
import json
import random
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sp_bench
from sp_bench.analysis.selection import select
from sp_bench.look.pack import pack
from sp_bench.rows import consistency, packed, store
from sp_bench.rows.digest import DIGEST, digests

from .rows import STARTED_AT, commit, row

RESULTS = Path(sp_bench.__file__).parents[1] / "results"
CAMPAIGNS = sorted(path for path in RESULTS.iterdir() if (path / "packed.parquet").exists())
HEADLINE = RESULTS / "h200x4_step_methods_4"  # training steps on GPUs, all columns


def test_every_committed_row_agrees_with_itself():
    tables = [store.read(folder) for folder in CAMPAIGNS]
    assert [problem for _, problems in tables for problem in problems] == []
    assert consistency.breaches(pa.concat_tables([table for table, _ in tables])) == {}


@pytest.fixture(scope="module")
def committed() -> dict[str, object]:
    return next(each for each in store.read(HEADLINE)[0].to_pylist() if each["status"] == "ok" and each["mfu"])


def scaled(column, factor):
    return lambda row: {column: row[column] * factor}


HAND_EDITS = {
    "half the median": scaled("median_step_ms", 0.5),
    "twice the rate": scaled("tokens_per_s", 2.0),
    "twice the rate of a GPU": scaled("tokens_per_s_per_gpu", 2.0),
    "faster steps than samples": lambda row: {"step_ms": [ms / 2 for ms in row["step_ms"]]},
    "faster samples than steps": lambda row: {
        "rank_step_ms": [[ms / 2 for ms in each] for each in row["rank_step_ms"]]
    },
    "a negative time": lambda row: {"rank_step_ms": [[-ms for ms in each] for each in row["rank_step_ms"]]},
    "no number": lambda row: {"loss": [float("nan"), *row["loss"][1:]]},
    "an infinite energy": lambda row: {"energy_j": [float("inf"), *(row["energy_j"] or [0.0])[1:]]},
    "more MFU": scaled("mfu", 1.1),
    "another length than its config's": scaled("seq_len", 2),
    "another method than its config's": lambda row: {"method": "ring" if row["method"] != "ring" else "ulysses"},
    "a config of another cell": lambda row: {"config": row["config"].replace('"seed":0', '"seed":1')},
    "an invented replicate": lambda row: {"replicate": row["replicate"] + 90},
    "an invented trial": lambda row: {"trial_id": "0123456789ab"},
    "an invented cell": lambda row: {"cell_id": "0123456789ab"},
    "an error above its budget": lambda row: {"rel_error_output": 9 * row["error_budget"]["output"]},
    "a gradient above its budget": lambda row: {"grad_error": row["grad_error"] | {"error": 1.0}},
    "fewer bytes": scaled("comm_counted_bytes", 0.5),
    "fewer predicted bytes": scaled("comm_predicted_bytes", 0.5),
    "a smaller peak": scaled("max_peak_allocated_bytes", 0.5),
    "fewer ranks than its world": lambda row: {"energy_j": [1.0]},
    "fewer losses than steps": lambda row: {"loss": row["loss"][1:]},
    "no proof": lambda row: {"rel_error_output": None},
    "no proof of the gradients": lambda row: {"sampled_grad_error": None},
    "no samples": lambda row: {"rank_step_ms": None},
    "no list of bytes": lambda row: {"comm": None},
    "a time of a trial that failed": lambda row: {"status": "oom", "reason": "2 GiB"},
    "a world of no rank": lambda row: {"world_size": 0},
    "a time less of one rank": lambda row: {"rank_step_ms": [row["rank_step_ms"][0][1:], *row["rank_step_ms"][1:]]},
    "a null among a rank's times": lambda row: {
        "rank_step_ms": [[None, *row["rank_step_ms"][0][1:]], *row["rank_step_ms"][1:]]
    },
    "no window of a rank": lambda row: {"window_ms": [None, *row["window_ms"][1:]]},
    "no leftover of a rank": lambda row: {"leftover_bytes": [None, *row["peak_allocated_bytes"][1:]]},
    "a key twice": lambda row: {"phase_s": [*row["phase_s"], row["phase_s"][0]]},
    "a package twice": lambda row: {
        "environment": row["environment"] | {"packages": 2 * row["environment"]["packages"]}
    },
    "no dtype that is known": lambda row: {"dtype": "float7"},
    "a schema of the future": lambda row: {"schema_version": 9},
}


@pytest.mark.parametrize("edit", HAND_EDITS.values(), ids=HAND_EDITS.keys())
def test_a_hand_edit_of_a_committed_row_is_found(committed, edit):
    edited = pa.Table.from_pylist([committed, committed | edit(committed)], schema=store.SCHEMA)
    assert list(consistency.breaches(edited)) == [1]


def test_rules_are_of_each_row_whatever_the_shapes_of_its_neighbours(committed):
    others = [row(method=method, schema_version=store.SCHEMA_VERSION) for method in ("ring", "ulysses")]
    mixed = [others[0], committed | {"median_step_ms": 1.0}, committed, others[1] | {"tokens_per_s": 1.0}]
    table = pa.Table.from_pylist(mixed, schema=store.SCHEMA)
    halves = pa.concat_tables([table.slice(0, 2), table.slice(2)])  # in chunks
    for each, first in ((table, 0), (table.slice(1), 1), (halves, 0)):
        assert sorted(consistency.breaches(each)) == [1 - first, 3 - first]


def test_a_flag_that_the_samples_ask_for_cannot_be_taken_away():
    doubtful = row(median_ms=12.5, step_ms=[10.0, 15.0] * 6, schema_version=store.SCHEMA_VERSION)
    both = [doubtful | {"flags": flags} for flags in ([], ["transient", "bimodal"])]
    found = consistency.breaches(pa.Table.from_pylist(both, schema=store.SCHEMA))
    assert found == {0: "flags lack bimodal, transient, which its samples ask for"}


def test_times_of_stages_are_those_of_the_steps():
    ends = [{"seq_len": n, "num_steps": k, "compiled": 0} for n, k in ((128, 2), (256, 4))]
    times = [
        {"first_step_ms": 10.0, "median_step_ms": 2.0, "tokens_per_s": 64_000.0},
        {"first_step_ms": 8.0, "median_step_ms": 4.0, "tokens_per_s": 64_000.0},
    ]
    rates = dict.fromkeys(("tokens_per_s", "tokens_per_s_per_gpu", "window_tokens_per_s"))
    steps = [10.0, 2.0, 8.0, 4.0, 4.0, 4.0]
    stream = {"workload": "stream", "pass_kind": "step", "seq_len": 256, "stages": "128x2", "warmup_steps": 0}
    stream |= {"step_ms": steps, "median_ms": 4.0, "flags": ["transient", "window_disagrees"]}
    right = row(**stream, stage_ends=ends, stage_times=times, schema_version=store.SCHEMA_VERSION, **rates)
    edits = [{}, {"stage_times": [times[0] | {"tokens_per_s": 128_000.0}, times[1]]}, {"tokens_per_s": 1.0}]
    edits.append({"stage_ends": [ends[1], ends[0]]})
    found = consistency.breaches(pa.Table.from_pylist([right | edit for edit in edits], schema=store.SCHEMA))
    assert found == {
        1: "stage_times is not what step_ms says of the stages",
        2: "tokens_per_s of a stream, of whose steps none stands for the others",
        3: "stage_ends is of stages [(256, 4), (128, 2)]; expected 128x2, then 256 tokens",
    }


def test_a_rate_of_attention_over_latents_is_that_of_the_kernel_alone():
    heads = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 192, "v_head_dim": 128, "kv_lora_rank": 512}
    pairs = 1024 * 1025 // 2
    rate = 2 * pairs * 16 * (4 * 192 + 3 * 128) / 10e-3
    right = row(**heads, median_ms=10.0, attention_flops_per_s=rate, schema_version=store.SCHEMA_VERSION)
    right["hardware_flops"] *= 1.3  # it has the up-projections
    edits = [{}, {"attention_flops_per_s": 1.3 * rate}, {"attention_flops_per_s": rate / 2}]
    found = consistency.breaches(pa.Table.from_pylist([right | edit for edit in edits], schema=store.SCHEMA))
    assert list(found) == [1, 2]
    assert found[2].startswith("attention_flops_per_s=")


ONE_RANK = RESULTS / "h200x1_one_rank_held"


def test_a_row_of_one_rank_names_its_proof_and_has_lists_of_one_entry():
    held = next(each for each in store.read(ONE_RANK)[0].to_pylist() if each["status"] == "ok")
    edits = [{}, {"proof": None}, {"window_ms": held["window_ms"] * 2}]
    found = consistency.breaches(pa.Table.from_pylist([held | edit for edit in edits], schema=store.SCHEMA))
    assert found == {
        1: "proof=null; a row of one rank names the row that proves it",
        2: "window_ms has 2 entries; expected 1, one for each rank",
    }


def test_a_rule_holds_from_the_schema_version_that_brought_it():
    made = row(timed_rel_error=None)
    both = [made | {"schema_version": version} for version in (4, 5)]
    found = consistency.breaches(pa.Table.from_pylist(both, schema=store.SCHEMA))
    assert found == {1: "timed_rel_error=null of an ok row"}


def test_the_row_is_skipped_and_named_and_counts_as_unread(tmp_path):
    good, bad = row(), row(method="ulysses")
    commit([good, bad | {"median_step_ms": 5.0}], tmp_path)
    selection = select([tmp_path])
    assert list(selection.rows["method"]) == ["ring"]
    (problem,) = selection.problems
    assert f"{bad['trial_id']}-" in problem
    assert "median_step_ms=5.0; the row's other columns give 10.0" in problem
    assert len(selection.unread) == 1
    with pytest.warns(UserWarning, match="median_step_ms=5.0"):
        assert list(sp_bench.load(tmp_path)["method"]) == ["ring"]


def test_a_value_that_changed_after_it_was_written_is_found_by_the_digest(tmp_path):
    (path,) = commit([row()], tmp_path).glob("*.parquet")
    table = pq.read_table(path)
    place = table.schema.get_field_index("duration_s")  # nothing follows from it
    edited = table.set_column(place, table.schema.field(place), pa.array([99.0]))
    pq.write_table(edited, path)
    rows, problems = store.read(tmp_path)
    assert rows.num_rows == 0
    assert problems == [f"{path.name}: its values are not those that were written (its digest differs); skipped"]
    place = table.schema.get_field_index(DIGEST)
    pq.write_table(table.set_column(place, DIGEST, pa.array([None], pa.string())), path)
    assert store.read(tmp_path) == (rows, problems)


def test_the_digest_depends_neither_on_packing_nor_on_columns_that_come_later(tmp_path):
    commit([row(replicate=r) for r in range(3)], tmp_path)
    before = store.read(tmp_path)[0]
    pack(tmp_path)
    after, problems = store.read(tmp_path)
    assert problems == []
    assert after[DIGEST].to_pylist() == before[DIGEST].to_pylist()
    table = packed.table(tmp_path).drop_columns([packed.FILE_NAME])
    written = table[DIGEST].to_pylist()
    environments = pa.array([each | {"a_new_field": None} for each in table["environment"].to_pylist()])
    place = table.schema.get_field_index("environment")
    later = table.set_column(place, "environment", environments).append_column("a_new_column", pa.nulls(3))
    assert digests(table) == digests(later) == written
    place = table.schema.get_field_index("duration_s")
    assert not {*digests(table.set_column(place, "duration_s", pa.array([4.0] * 3)))} & {*written}


def test_the_digest_is_of_the_row_as_json_with_sorted_keys_and_without_nulls():
    """The text is made column by column; all rows that were ever committed were hashed so."""
    kinds = {
        "floats": [[0.1, 1e-7, 5.0], None, []], "nested": [[[1.0], []], [[2.0, 3.0]], None],
        "text": ['"é', None, "null"],
        "structs": [[{"b": 1, "a": None}, {"b": None, "a": True}], None, []], "at": [STARTED_AT, None, STARTED_AT],
        "count": [1, 2, None], "struct": [{"b": "x", "a": [{"c": 1.5}]}, None, {"b": None, "a": None}],
    }  # fmt: skip
    pairs = pa.array([[("b", 1.5), ("a", None)], None, []], pa.map_(pa.string(), pa.float64()))
    table = pa.table(kinds | {"pairs": pairs})

    def without_nulls(value):
        if isinstance(value, dict):
            return {key: without_nulls(each) for key, each in value.items() if each is not None}
        return [without_nulls(each) for each in value] if isinstance(value, list) else value

    for start in range(3):  # of a slice too
        rows = [without_nulls(each) for each in table.slice(start).to_pylist()]
        texts = [json.dumps(each, sort_keys=True, separators=(",", ":"), default=str) for each in rows]
        assert digests(table.slice(start)) == [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]


def test_a_copy_under_another_name_is_no_further_replicate(tmp_path):
    made = row(replicate=0)
    again = row(replicate=1) | {"started_at": made["started_at"]}
    selection = select([commit([made, again], tmp_path)])
    assert len(selection.rows) == 1
    assert any("copy" in problem for problem in selection.problems)
    later = row(replicate=1) | {"started_at": made["started_at"] + timedelta(seconds=9)}
    assert len(select([commit([made, later], tmp_path / "real")]).rows) == 2


def test_a_config_that_is_no_json_is_a_row_all_the_same(tmp_path):
    assert len(select([commit([row(config="not JSON")], tmp_path)]).rows) == 1
    assert json.loads(row()["config"])["seq_len"] == 1024


@pytest.mark.parametrize("packs", [False, True], ids=["file", "pack"])
@pytest.mark.parametrize("width", [1, 64], ids=["a bit", "64 bytes of noise"])
def test_damage_on_the_disk_is_named_and_gives_no_other_value(tmp_path, packs, width):
    commit([row(replicate=replicate) for replicate in range(3)], tmp_path)
    if packs:
        pack(tmp_path)
    path = min(tmp_path.glob("*.parquet"))
    whole, written = path.read_bytes(), {each["trial_id"]: each for each in consistency.read(tmp_path)[0].to_pylist()}
    draw, num_named = random.Random(width), 0
    for _ in range(60):
        at = draw.randrange(len(whole) - width)
        noise = bytes([whole[at] ^ 1 << draw.randrange(8)]) if width == 1 else draw.randbytes(width)
        path.write_bytes(whole[:at] + noise + whole[at + width :])
        table, problems = consistency.read(tmp_path)
        rows = table.to_pylist()
        assert all(each == written[each["trial_id"]] for each in rows), at
        assert len(rows) == len(written) or problems, at
        num_named += bool(problems)
    assert num_named > 15  # the others hit bytes that nothing reads, of which a small file has many


@pytest.mark.parametrize(
    ("campaign", "change", "words"),
    [
        ("h200x1_stream", {"stage_loss_errors": [0.0]}, "stage_loss_errors has 1 entries; expected 2"),
        ("cpu_stream", {"batches": lambda of: [each | {"imbalance": 1.7e308} for each in of]}, "of a batch; from 1 to"),
        ("cpu_stream", {"batches": lambda of: [each | {"imbalance": 0.5} for each in of]}, "imbalance=0.5 of a batch"),
    ],
)
def test_a_stream_whose_batches_or_stages_cannot_be_is_named(campaign, change, words):
    rows = store.read(RESULTS / campaign)[0].to_pylist()
    ((name, value),) = change.items()
    at = next(i for i, each in enumerate(rows) if each[name])
    rows[at] |= {name: value(rows[at][name]) if callable(value) else value}
    breaches = consistency.breaches(pa.Table.from_pylist(rows, schema=store.SCHEMA))
    assert [*breaches] == [at]
    assert words in breaches[at]


BEFORE_DIGESTS = ("h100_kernels", "h200x2_same_kernel", "h200x2_transformer_engine", "cpu_packed_gate")  # 1 to 4


@pytest.mark.parametrize("campaign", BEFORE_DIGESTS)
def test_a_damaged_footer_of_a_row_from_before_digests_gives_no_other_value(tmp_path, campaign):
    """One byte of it is another: in a name, a type, a place or a length."""
    rows = packed.table(RESULTS / campaign)
    at = rows["status"].to_pylist().index("ok")
    row = rows.slice(at, 1).drop_columns(packed.FILE_NAME)
    path = tmp_path / rows[packed.FILE_NAME][at].as_py()
    with open(path, "wb") as file:
        store.write_table(row, file, row.schema)
    data, written = path.read_bytes(), repr(store.read(tmp_path)[0].to_pylist())
    footer = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    draw, num_skipped = random.Random(campaign), 0
    for at in draw.sample(range(footer, len(data)), 120):
        wrong = data[at] ^ draw.choice([1 << draw.randrange(8), draw.randrange(1, 256)])
        path.write_bytes(data[:at] + bytes([wrong]) + data[at + 1 :])
        table, problems = store.read(tmp_path)
        assert problems or repr(table.to_pylist()) == written, (at - footer, wrong)
        num_skipped += not table.num_rows
    assert num_skipped > 40  # the others hit bytes that nothing reads, as a column's encodings


def _with_field(table: pa.Table, change) -> pa.Table:
    """The table whose field `comm.counted_bytes` is another one."""
    place = table.schema.get_field_index("comm")
    fields = [
        change(field) if field.name == "counted_bytes" else field for field in table.schema.field(place).type.value_type
    ]
    column = table["comm"].combine_chunks()
    parts = [part.cast(field.type) for part, field in zip(column.values.flatten(), fields, strict=True)]
    entries = pa.StructArray.from_arrays(parts, fields=fields)
    return table.set_column(place, "comm", pa.ListArray.from_arrays(column.offsets, entries))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda field: field.with_name("bounted_bytes"), "comm.bounted_bytes"),
        (lambda field: field.with_name("predicted_bytes"), "its comm has a field twice"),
        (lambda field: field.with_type(pa.float32()), "its comm.counted_bytes is float, not double"),
    ],
    ids=["unknown name", "name of another", "type"],
)
def test_a_damaged_field_of_old_rows_is_named_and_they_are_skipped(tmp_path, change, words):
    rows = _with_field(packed.table(RESULTS / "h100_kernels").slice(0, 3), change)
    pq.write_table(rows, tmp_path / packed.PACK)
    table, problems = store.read(tmp_path)
    assert (table.num_rows, words in " ".join(problems)) == (0, True)
    (tmp_path / packed.PACK).unlink()
    first = rows.slice(0, 1)
    pq.write_table(first.drop_columns(packed.FILE_NAME), tmp_path / first[packed.FILE_NAME][0].as_py())
    table, problems = store.read(tmp_path)
    assert (table.num_rows, words in problems[0]) == (0, True)


def test_a_damaged_column_of_a_pack_costs_the_rows_that_no_newer_version_can_have_written(tmp_path):
    rows = packed.table(RESULTS / "h100_kernels").slice(0, 3)
    versions = pa.array([1, store.SCHEMA_VERSION, store.SCHEMA_VERSION + 1])
    rows = rows.set_column(rows.column_names.index("schema_version"), "schema_version", versions)
    pq.write_table(rows.append_column("of_tomorrow", pa.array([7, 7, 7])), tmp_path / packed.PACK)
    table, problems = store.read(tmp_path, store.IDENTITY)
    assert table["trial_id"].to_pylist() == rows["trial_id"].to_pylist()[1:]
    assert problems == [
        "packed.parquet: columns of another schema left out: of_tomorrow",
        "packed.parquet: damaged: 1 row is older than these columns; skipped",
    ]


def test_a_damaged_file_is_not_packed(tmp_path):
    damaged = min(commit([row(), row(replicate=1)], tmp_path).glob("*.parquet"))
    table = pq.read_table(damaged)
    place = table.schema.get_field_index("duration_s")
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array([99.0])), damaged)
    packed_rows = pack(tmp_path)
    assert packed_rows.num_rows == 1
    assert damaged.exists()
    assert "its digest differs" in packed_rows.left[0]
