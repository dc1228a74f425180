"""The section on the interconnect: latency and bandwidth of each fabric, primitive and number of ranks."""

from collections.abc import Sequence
from itertools import groupby

from sp_bench.costs.message_sizes import transport_name
from sp_bench.report.cells import Cell
from sp_bench.report.formats import GIB, in_bytes, number, whole
from sp_bench.report.page.parts import Line, Section, Table

HEAD = (
    *("fabric", "primitive", "sp_size", "latency (µs)", "bandwidth (GiB/s)", "largest message"),
    *("at the largest (GiB/s)", "replicates ok"),
)
CAPTION = (
    "The line ms = latency + bytes / bandwidth through the times of all message sizes, 64 KiB to the largest, by least "
    "squares of the relative residuals: where small messages wait for the host, its bandwidth is more than any message "
    "has. Bytes are those that one rank sends off-rank, for every primitive alike. "
    "Medians over replicates. A dash is what the times cannot tell: their line begins below zero or does not rise."
)


def section(cells: Sequence[Cell]) -> Section | None:
    """None without a measured fabric. Failed attempts are where all of them are."""
    measured = sorted((c for c in cells if c.asked["workload"] == "collective" and c.ok), key=_place)
    if not measured:
        return None
    return Section(
        anchor="interconnect",
        title="Interconnect",
        basis="Each line is one fabric, primitive and sp_size: no scaling, and no ratio that needs a baseline.",
        tables=tuple(
            Table(name, CAPTION, HEAD, tuple(map(_line, group)), left=(0, 1))
            for name, group in groupby(measured, key=_setting)
        ),
    )


def _setting(cell: Cell) -> str:
    warm = ", warm process group" if cell.asked["isolation"] == "group" else ""
    return f"{cell.asked['hardware']}, {cell.asked['dtype']}{warm}"


def _primitive(cell: Cell) -> str:
    return transport_name(cell.asked["primitive"], cell.options["method.exchange"])


def _place(cell: Cell) -> tuple[str, str, str, int, float]:
    asked = cell.asked
    return (
        _setting(cell),
        asked["fabric"],
        _primitive(cell),
        asked["sp_size"],
        cell.middle("comm_counted_bytes") or 0,
    )


def _line(cell: Cell) -> Line:
    latency, bandwidth = cell.middle("latency_us"), cell.middle("bandwidth_bytes_per_s")
    largest, step_ms = cell.middle("comm_counted_bytes"), cell.median_step_ms
    texts = (
        *(str(cell.asked["fabric"]), _primitive(cell), whole(cell.asked["sp_size"]), number(latency)),
        *(number(None if bandwidth is None else bandwidth / GIB), in_bytes(largest)),
        number(1e3 * largest / step_ms / GIB if largest and step_ms else None),
        f"{len(cell.step_ms)} of {len(cell.rows)}",
    )
    return Line(texts, (cell,))
