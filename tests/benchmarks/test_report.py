"""How long a report of 5,000 rows takes, figures included, stage by stage, and how much memory: 30 s and 1 GiB on 2
cores are the aim. Timings are for reading, not for passing."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sp_bench.analysis.cells import cells
from sp_bench.analysis.selection import select
from sp_bench.rows import store

from ..unit.rows import row, splits

pytestmark = pytest.mark.load
ROWS = 5000
PROGRAM = """
import json, resource, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from sp_bench import report

def stage(words):
    stages[words.partition(":")[0].partition(" ")[0]] = time.perf_counter() - began

began, stages = time.perf_counter(), {}
with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
    report.build([Path(sys.argv[1])], Path(sys.argv[2]), executor=executor, say=stage)
    stages["end"] = time.perf_counter() - began
usage = [resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({"begins_at_s": stages, "peak_gib": usage[0], "largest_child_gib": usage[1]}))
"""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5,000 rows as `results.write` commits them, without its syncs: 6 replicates of cells of 4 settings, some oom."""
    folder = tmp_path_factory.mktemp("results") / "large"
    folder.mkdir()
    asked = itertools.product(
        range(6), (1, 2, 4, 8), [1024 * 2**i for i in range(7)], ("forward", "forward_backward"), (8, 4, 2, 1)
    )
    made = (
        row(
            replicate=replicate,
            status="oom" if seq_len > 2**15 and split["method"] == "all_gather" else "ok",
            median_ms=(seq_len / 1000) ** 1.5 / sp_size * (1 + 0.01 * replicate + 0.05 * place),
            seq_len=seq_len,
            pass_kind=pass_kind,
            num_kv_heads=kv_heads,
            **split,
        )
        for replicate, sp_size, seq_len, pass_kind, kv_heads in asked
        for place, split in enumerate(splits(sp_size))
    )
    rows = [each | {"schema_version": store.SCHEMA_VERSION} for each in itertools.islice(made, ROWS)]
    table = pa.Table.from_pylist(rows, schema=store.SCHEMA)
    for place, each in enumerate(rows):
        name = store.RowName(each["trial_id"], each["env_id"], each["attempt"], each["status"]).file_name
        pq.write_table(table.slice(place, 1), folder / name, use_dictionary=False, write_statistics=False)
    return folder


@pytest.mark.timeout(1800)  # a busy machine is no failure
def test_report_of_5_000_rows_with_figures(benchmark, campaign: Path, tmp_path: Path) -> None:
    def report() -> dict[str, object]:
        command = [sys.executable, "-c", PROGRAM, str(campaign), str(tmp_path)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    benchmark.extra_info.update(benchmark.pedantic(report, rounds=1))
    assert len(list((tmp_path / "figures").glob("*.pdf"))) >= 1
    assert (tmp_path / "index.html").stat().st_size < 5 * 2**20


def test_summarise_1_000_of_them(benchmark, campaign: Path) -> None:
    rows = select([campaign]).rows.head(1000)
    assert sum(len(cell.rows) for cell in benchmark.pedantic(cells, (rows,), rounds=3)) == 1000
