"""How long it takes to commit rows, to list them and to read them back."""

import itertools

from sp_bench.rows import store


def row(index: int) -> dict[str, object]:
    return {
        "status": "ok",
        "trial_id": f"{index:012x}",
        "env_id": "01234567",
        "attempt": 0,
        "method": "ring",
        "rank_step_ms": [[1.0] * 10] * 8,
        "comm": [{"phase": "forward", "op": "send", "calls": 7, "predicted_bytes": 1.0, "counted_bytes": 1.0}],
    }


def test_commit_a_row(benchmark, tmp_path):
    index = itertools.count()
    benchmark(lambda: store.write(row(next(index)), tmp_path))
    assert len(list(store.committed(tmp_path))) == next(index)


def test_list_10_000_rows_by_name(benchmark, tmp_path):
    for index in range(10_000):
        (tmp_path / store.RowName(f"{index:012x}", "01234567", 0, "ok").file_name).touch()
    assert len(benchmark(lambda: list(store.committed(tmp_path)))) == 10_000


def test_read_200_rows(benchmark, tmp_path):
    for index in range(200):
        store.write(row(index), tmp_path)
    table, problems = benchmark.pedantic(store.read, (tmp_path,), rounds=3)
    assert (table.num_rows, problems) == (200, [])
