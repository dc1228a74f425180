"""The report's section on the interconnect, and the rest of the page beside rows that have no attention."""

from typing import Any

import pytest

from sp_bench.driver.plan import plan
from sp_bench.report import build
from sp_bench.report.cells import cells
from sp_bench.report.formats import MISSING
from sp_bench.report.page import interconnect
from sp_bench.report.selection import select
from sp_bench.rows import store

from .rows import asked_for, row

NO_ATTENTION = dict.fromkeys(("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "rel_error_output", "correctness_seq_len"))


@pytest.fixture
def curve(make_config):
    """A row as the collective workload leaves it."""

    def made(
        fabric: str, method: str = "ulysses", sp_size: int = 2, median_ms: float = 8.0, **columns: Any
    ) -> dict[str, Any]:
        (planned,) = plan([make_config(workload="collective", method=method, sp_size=sp_size)], 1, 0, None)
        asked = asked_for(planned.config) | {"fabric": fabric}
        measured = {"latency_us": 20.0, "bandwidth_bytes_per_s": 2.0 * 2**30, "comm_predicted_bytes": 2.0**24}
        measured |= {"comm_counted_bytes": 2.0**24, "comm": []}
        base = row(fabric=fabric, method=method, sp_size=sp_size, workload="collective", median_ms=median_ms, **columns)
        return base | asked | (measured if base["status"] == "ok" else {}) | NO_ATTENTION | columns

    return made


def section(tmp_path, *rows):
    folder = tmp_path / "fabrics"
    folder.mkdir()
    for made in rows:
        store.write(made, folder)
    return interconnect.section(cells(select([folder]).rows))


def test_each_fabric_primitive_and_number_of_ranks_is_one_line_with_the_median_of_its_replicates(tmp_path, curve):
    made = section(
        tmp_path,
        curve("shm", "ring", latency_us=None),
        curve("shm"),
        *(curve("nvlink", replicate=i, latency_us=10.0 + i, median_ms=4.0) for i in range(3)),
        curve("nvlink", sp_size=4, median_ms=16.0, status="error"),
        curve("nvlink", method="all_gather", sp_size=4, median_ms=16.0),
    )
    assert made is not None
    (table,) = made.tables
    assert [line.texts for line in table.lines] == [
        ("nvlink", "all_gather", "4", "20.0", "2.00", "16.0 MiB", "0.977", "1 of 1"),
        ("nvlink", "all_to_all", "2", "11.0", "2.00", "16.0 MiB", "3.91", "3 of 3"),
        ("shm", "all_to_all", "2", "20.0", "2.00", "16.0 MiB", "1.95", "1 of 1"),
        ("shm", "send_recv", "2", MISSING, "2.00", "16.0 MiB", "1.95", "1 of 1"),
    ]
    assert [sum(len(cell.measured) for cell in line.cells) for line in table.lines] == [1, 3, 1, 1]
    assert all(len(line.texts) == len(table.head) for line in table.lines)


def test_without_a_measured_fabric_there_is_no_section(tmp_path, curve):
    assert section(tmp_path, row(), curve("socket", status="error")) is None


def test_a_page_of_attention_and_fabrics_names_both_and_what_failed(tmp_path, curve):
    folder = tmp_path / "mixed"
    folder.mkdir()
    for made in (row(), row(method="ulysses"), curve("nvlink"), curve("socket", status="error")):
        store.write(made, folder)
    built = build([folder])
    page = built.page.read_text()
    assert built.problems == ()
    assert "made up: error" in page


def test_a_page_of_fabrics_alone_can_be_made(tmp_path, curve):
    folder = tmp_path / "fabrics"
    folder.mkdir()
    store.write(curve("gloo"), folder)
    assert build([folder]).page.is_file()
