"""Whether a cost grows faster than its rows: 1,000, 3,000 and 10,000 packed rows, and as many claims; and what 100,000
rows cost. Seconds of a core, which a busy machine moves least. Exponents above 1.1 are printed, for reading; above 1.5
they fail."""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sp_bench
from sp_bench import report
from sp_bench.analysis.comparison import compare
from sp_bench.driver.claims import Claims
from sp_bench.look import status
from sp_bench.rows import packed, store
from sp_bench.rows.digest import DIGEST, digests

from ..unit.rows import row, splits

pytestmark = [pytest.mark.load, pytest.mark.timeout(3600)]
SIZES = (1000, 3000, 10_000)
LARGE = 100_000
REPLICATES = 6
LINEAR, QUADRATIC = 1.1, 1.5  # above the first an exponent is printed, above the second it fails


def packed_rows(folder: Path, number: int) -> Path:
    """A campaign of that many rows in a pack: replicates of methods at ever longer lengths, each with its digest."""
    folder.mkdir(parents=True)
    made = []
    while len(made) < number:
        place = len(made)
        made += [
            row(
                replicate=replicate,
                median_ms=10.0 + place % 7 + 0.01 * replicate,
                seq_len=1024 + 64 * place,
                schema_version=store.SCHEMA_VERSION,
                **split,
            )
            for split in splits(1) + splits(4)
            for replicate in range(REPLICATES)
        ]
    rows = pa.Table.from_pylist(made[:number], schema=store.SCHEMA)
    at = store.SCHEMA.get_field_index(DIGEST)
    rows = rows.set_column(at, store.SCHEMA.field(at), pa.array(digests(rows)))
    identities = zip(*(rows[name].to_pylist() for name in ("trial_id", "env_id", "attempt", "status")), strict=True)
    names = [store.RowName(*each).file_name for each in identities]
    rows = rows.append_column(packed.FILE_NAME, pa.array(names)).sort_by(packed.FILE_NAME)
    pq.write_table(rows, folder / packed.PACK, compression="zstd", store_schema=False, write_page_checksum=True)
    return folder


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("results")
    return [packed_rows(root / f"rows_{number}", number) for number in SIZES]


def exponent(seconds: list[float]) -> float:
    """The slope of the line through the points in logarithms."""
    points = [(math.log(n), math.log(s)) for n, s in zip(SIZES, seconds, strict=True)]
    x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def claimed(folder: Path) -> None:
    keys = [f"{number:012x}-01234567-0" for number in range(int(folder.name.removeprefix("rows_")))]
    with Claims(folder / store.WORK / "claims") as claims:
        assert len(claims.take_all(keys, lambda _: False)) == len(keys)


VERBS: dict[str, Callable[[Path], object]] = {
    "status": status.overview,
    "load": lambda folder: sp_bench.load(folder),
    "compare": lambda folder: compare(folder, folder),
    "findings": lambda folder: report.write_findings([folder], folder / "_findings.md"),
    "claims": claimed,
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_cost_grows_no_faster_than_the_rows(verb: str, campaigns: list[Path], capsys: pytest.CaptureFixture) -> None:
    seconds = []
    for folder in campaigns:
        begin = time.process_time()
        VERBS[verb](folder)
        seconds.append(time.process_time() - begin)
    found = exponent(seconds)
    if found > LINEAR:
        with capsys.disabled():
            points = [f"{s:.2f} s of {n:,}" for n, s in zip(SIZES, seconds, strict=True)]
            print(f"\n{verb}: exponent {found:.2f}; {', '.join(points)}")
    assert found < QUADRATIC


SP_BENCH = (sys.executable, "-m", "sp_bench")
CLAIMS = """
import pathlib, sp_bench.driver.claims as claims
with claims.Claims(pathlib.Path("claims")) as of_all:
    assert len(of_all.take_all([f"{n:012x}-01234567-0" for n in range(2000)], lambda _: False)) == 2000
"""
LIMITS: dict[str, tuple[float, float, Sequence[str]]] = {  # seconds of a core, GB, the command
    "status": (3, 2, [*SP_BENCH, "status", "large"]),
    "load": (10, 2, [sys.executable, "-c", "import sp_bench; sp_bench.load(['large'])"]),
    "compare, two campaigns of 50,000": (30, 2, [*SP_BENCH, "compare", "half", "half"]),
    "findings": (60, 2, [*SP_BENCH, "report", "large", "--findings=findings.md"]),
    "claims of 2,000 trials": (1, 2, [sys.executable, "-c", CLAIMS]),
    "advise": (3, 2, [*SP_BENCH, "advise", "--model=qwen3_8b", "--gpus=16", "--seq-len=262144"]),
}
# a process begins with the memory of the one that starts it: this small one does, and says what the command took
MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    packed_rows(root / "half", LARGE // 2)
    return packed_rows(root / "large", LARGE)


@pytest.mark.parametrize("verb", LIMITS)
def test_100_000_rows_cost_no_more(verb: str, large: Path, record_property: Callable[[str, object], None]) -> None:
    seconds, gigabytes, words = LIMITS[verb]
    measured = subprocess.check_output([sys.executable, "-c", MEASURED, *words], cwd=large.parent, text=True)
    took, peak = map(float, measured.split())
    record_property("cost", {"what": verb, "limit_s": seconds, "s": took, "limit_gb": gigabytes, "gb": peak})
    assert took <= seconds
    assert peak <= gigabytes
