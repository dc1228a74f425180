"""Files in a campaign's folder that are no rows of ours: each is named in one line and skipped."""

import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sp_bench.config.parsing import shown
from sp_bench.rows import schema, store

ROW = {"status": "ok", "trial_id": "0123456789ab", "env_id": "01234567", "attempt": 0}
NAME = store.RowName("0123456789ab", "01234567", 0, "ok")
QUICK = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=300, **QUICK)
@given(text=st.text(st.characters(), max_size=300))
def test_what_is_shown_of_foreign_text_is_one_short_line(text):
    line = shown(text)
    assert line.isprintable()
    assert len(line) < 250
    assert line == text or not text.isprintable() or len(text) > 200


def refused(folder: Path) -> str:
    """The one line that is said of the one file of a folder, which is no row."""
    table, problems = store.read(folder)
    assert table.num_rows == 0
    (line,) = problems
    assert line.isprintable()
    assert line.endswith("; skipped")
    return line


def written(table: pa.Table, folder: Path) -> Path:
    pq.write_table(table, folder / NAME.file_name)
    return folder


def row_table(**columns: object) -> pa.Table:
    """A row's identity and these columns, under the mark of our rows."""
    table = pa.table({name: pa.array([value]) for name, value in ROW.items()} | columns)
    return table.replace_schema_metadata(store.SCHEMA.metadata)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    lists = {"step_ms": [1.0, 2.0], "rank_step_ms": [[1.0], [2.0]], "started_at": datetime(2026, 1, 2, tzinfo=UTC)}
    return store.write(ROW | lists, tmp_path_factory.mktemp("valid")).read_bytes()


MUTATIONS = st.lists(
    st.tuples(st.sampled_from(("set", "cut", "drop", "insert", "number")), st.floats(0, 1), st.binary(max_size=8)),
    min_size=1,
    max_size=4,
)


def mutated(data: bytes, mutations: Sequence[tuple[str, float, bytes]]) -> bytes:
    for kind, place, patch in mutations:
        # half of the places are in the footer, where the structure is
        start = int(len(data) * (place if place < 0.5 else 1 - (1 - place) ** 3))
        if kind == "set":
            data = data[:start] + patch + data[start + len(patch) :]
        elif kind == "cut":
            data = data[:start]
        elif kind == "drop":
            data = data[:start] + data[start + len(patch) :]
        elif kind == "insert":
            data = data[:start] + patch + data[start:]
        else:  # the length of the footer
            data = data[:-8] + patch[:4].ljust(4, b"\xff") + data[-4:]
    return data


@settings(max_examples=700, **QUICK)
@given(mutations=MUTATIONS, marked=st.booleans())
@example(mutations=[("set", 0.20509304495383934, b"\x00\x00\x00\x00\x00\x00\x00\x04")], marked=False)
def test_a_damaged_file_is_a_row_of_its_name_or_is_named(valid, mutations, marked):
    data = valid if marked else valid.replace(store.MARK, store.MARK[::-1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NAME.file_name
        path.write_bytes(mutated(data, mutations))
        table, problems = store.read(Path(folder))
        assert os.listdir(folder) == [path.name]
    table.validate(full=True)
    assert (table.schema.equals(store.SCHEMA), table.num_rows <= 1) == (True, True)
    assert all(line.isprintable() and line.startswith(path.name) for line in problems)
    if table.num_rows:
        (read,) = table.to_pylist()
        assert {name: read[name] for name in ROW} == ROW
    else:
        assert len(problems) == 1


TYPES = st.sampled_from(
    [
        *(pa.array([1], pa.int8()), pa.array([2**63], pa.uint64()), pa.array([1.5]), pa.array([True])),
        *(pa.array(["x"]), pa.array([b"\xff"]), pa.array([None]), pa.array([[1]]), pa.array([[["x"]]])),
        *(
            pa.array([{"a": 1}]),
            pa.array([{"output": "x"}]),
            pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        ),
        *(pa.array([2**52], pa.timestamp("s")), pa.array([1], pa.time64("us")), pa.array([1], pa.date32())),
        pa.array(["x"]).dictionary_encode(),
    ]
)


@settings(max_examples=300, **QUICK)
@given(columns=st.dictionaries(st.sampled_from([*store.SCHEMA.names, "novelty"]), TYPES, min_size=1, max_size=4))
def test_columns_of_any_type_are_a_row_of_the_schema_or_are_named(columns):
    with tempfile.TemporaryDirectory() as folder:
        table, problems = store.read(written(row_table(**columns), Path(folder)))
    assert table.schema.equals(store.SCHEMA)
    assert all(line.isprintable() for line in problems)
    assert table.num_rows == 1 or len(problems) == 1
    for name, column in columns.items():
        if name in store.SCHEMA.names and pa.types.is_boolean(column.type):
            assert table.num_rows == 0 or schema.SCHEMA.field(name).type == pa.bool_()


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("status", pa.array([1])),
        ("median_step_ms", pa.array(["fast"])),
        ("median_step_ms", pa.array([True])),
        ("replicate", pa.array([0.5])),
        ("step_ms", pa.array([1.0])),
        ("causal", pa.array(["yes"])),
        ("environment", pa.array(["laptop"])),
    ],
)
def test_a_column_of_a_wrong_type_is_named_with_both_types(tmp_path, column, values):
    line = refused(written(row_table(**{column: values}), tmp_path))
    assert column in line or "its columns say" in line


@pytest.mark.parametrize("change", [{"status": "oom"}, {"trial_id": "f" * 12}, {"attempt": 1}, {"env_id": None}])
def test_a_row_under_another_rows_name_is_named(tmp_path, change):
    table = row_table(**{name: pa.array([value], store.SCHEMA.field(name).type) for name, value in change.items()})
    assert "not a row of this name" in refused(written(table, tmp_path))


@pytest.mark.parametrize("name", ["status", "median_step_ms"])
def test_a_column_that_is_there_twice_is_named(tmp_path, name):
    table = row_table(median_step_ms=pa.array([1.5]))
    assert "it has a column twice" in refused(written(table.append_column(name, table[name]), tmp_path))


def test_two_rows_in_a_file_are_none(tmp_path):
    assert "it has 2 of them" in refused(written(pa.concat_tables([row_table(), row_table()]), tmp_path))


def test_a_file_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path):
    text = pa.array(["a" * (store.MAX_ROW_BYTES + 1)])
    pq.write_table(row_table(reason=text), tmp_path / NAME.file_name, compression="zstd", use_dictionary=False)
    assert (tmp_path / NAME.file_name).stat().st_size < 100_000
    assert "it unpacks to 67,1" in refused(tmp_path)


def test_a_file_larger_than_any_row_is_not_read(tmp_path):
    with open(tmp_path / NAME.file_name, "wb") as file:
        file.truncate(2**40)  # a hole: takes no space
    assert "1,099,511,627,776 bytes" in refused(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"PAR1\xff\xff\xff\x7fPAR1", b"a,b\n1,2\n", b"\x80\x04N.", b"PK\x03\x04"]
)
def test_empty_torn_and_foreign_files_are_named(tmp_path, data):
    (tmp_path / NAME.file_name).write_bytes(data)
    assert refused(tmp_path).startswith(NAME.file_name)


def test_a_table_of_another_tool_is_named_with_what_it_lacks(tmp_path):
    assert "it has no status, trial_id, env_id, attempt" in refused(written(pa.table({"x": [1]}), tmp_path))


@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "../../{outside}", "nowhere", "{itself}"])
def test_a_row_that_is_a_link_out_of_the_results_is_neither_read_nor_counted(tmp_path, target):
    campaign = tmp_path / "results" / "c"
    campaign.mkdir(parents=True)
    store.write(ROW, tmp_path)
    name = NAME.file_name
    (campaign / name).symlink_to(target.format(outside=name, itself=name))
    assert refused(campaign).startswith(name)
    assert list(store.committed(campaign)) == []
    assert [line.partition(":")[0] for line in store.passed_over(campaign)] == [name]


def test_a_row_that_is_a_link_to_a_sibling_campaign_is_read(tmp_path):
    (tmp_path / "all").mkdir()
    (tmp_path / "night").mkdir()
    (tmp_path / "all" / NAME.file_name).symlink_to(store.write(ROW, tmp_path / "night"))
    table, problems = store.read(tmp_path / "all")
    assert (table.num_rows, problems) == (1, [])
    assert list(store.committed(tmp_path / "all")) == [NAME]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_and_a_folder_of_a_rows_name_are_passed_over_without_waiting(tmp_path, make):
    make(tmp_path / NAME.file_name)
    assert refused(tmp_path) == f"{NAME.file_name}: not a file; skipped"
    assert list(store.committed(tmp_path)) == []


@pytest.mark.parametrize(
    "name",
    [
        "notes\n.parquet",
        "\udcff.parquet",
        f"{'a' * 12}-{'b' * 8}-00-ok.parquet",
        f"{'a' * 12}-{'b' * 8}-\u0661-ok.parquet",
        f"{'a' * 12}-{'b' * 8}-9999999999-ok.parquet",
        f"{'A' * 12}-{'b' * 8}-0-ok.parquet",
        f"{'a' * 12}-{'b' * 8}-0-ok.parquet\n",
    ],
)
def test_a_name_that_no_row_has_is_passed_over_in_one_line(tmp_path, name):
    (tmp_path / name).touch()
    assert "its name has another form" in refused(tmp_path)
    assert list(store.committed(tmp_path)) == []


@pytest.mark.parametrize("listed", [store.committed, store.passed_over, store.read])
def test_listing_and_reading_make_nothing(tmp_path, listed):
    (tmp_path / "notes.txt").touch()
    listed(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_time_that_no_calendar_has_is_named_and_skipped(tmp_path):
    written(row_table(started_at=pa.array([2**62], pa.timestamp("us", tz="UTC"))), tmp_path)
    assert "date value out of range" in refused(tmp_path)
