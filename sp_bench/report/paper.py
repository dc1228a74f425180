"""Figure 1 and Table 1 of a paper, from lines that its author chose. The figure is drawn at a venue's width."""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.chosen import AXES, Lines, Words, as_shown, chosen
from sp_bench.analysis.grades import Grade, legend
from sp_bench.analysis.identifiers import KERNEL, SAVED
from sp_bench.analysis.metrics import memory_gib, tflops, tokens_per_s_per_gpu
from sp_bench.analysis.settings import Difference
from sp_bench.analysis.statistics import Interval
from sp_bench.formats import MISSING, gib, number, whole
from sp_bench.report import Options, folder, measured, table
from sp_bench.report.figures import draw_lines
from sp_bench.report.figures.lines import apart, replicates, shared, speed_of
from sp_bench.report.table import Column, Group, Table

FIGURE, TABLE = "figure1", "table1"
UNFAIR = "none"
UNGRADED = {UNFAIR: "kernel, recomputation or offload differ", "one_rank": "messages are modelled"}


@dataclass(frozen=True)
class TableLine:
    name: str
    cell: Cell
    beside: Difference | None  # to the first line; None: it is that one, or one of them ran out of memory

    @property
    def grade(self) -> Grade | None:
        """None where the two differ in kernel, recomputation or offload: the ratio is of these too."""
        beside = self.beside
        is_fair = beside and all(beside.fast.options.get(n) == beside.slow.options.get(n) for n in (KERNEL, *SAVED))
        return beside.grade if beside and is_fair else None


def write(
    folders: Sequence[Path],
    out: Path,
    asked: Sequence[tuple[str, Words]],
    options: Options,
    executor: Executor | None = None,
) -> None:
    """Write the figure as pdf, png and csv, with its caption as tex, and the table as tex, md and csv.

    Raises:
        OSError: a campaign cannot be read, or `out` cannot be written.
        ConfigError: as `chosen`.
    """
    look = options.look
    selection, known = measured(folders, options, executor)
    lines = chosen(known, [(name, as_shown(values, selection.campaigns)) for name, values in asked])
    drawing, made = draw_lines(lines, look, FIGURE), table_of(lines)
    texts = {
        f"{TABLE}.tex": table.latex([made], "table*" if look.column == 2 else "table"),
        f"{TABLE}.md": table.markdown([made]),
        f"{TABLE}.csv": table.as_csv(VALUES, made.lines),
    }
    files = {f"{FIGURE}.{suffix}": data for suffix, data in drawing.files.items()}
    folder.write(out, files | {name: text.encode() for name, text in texts.items()})


def table_of(lines: Lines) -> Table[TableLine]:
    """A group for each length, or number of GPUs; in it the chosen lines that are there."""
    first = lines.lines[0]
    groups = []
    for place in lines.places:
        there = [(line.name + words.bound(cell), cell) for line in lines.lines if (cell := line.cells.get(place))]
        of = [TableLine(name, cell, _beside(first.cells.get(place), cell)) for name, cell in there]
        groups.append(Group(f"{whole(place)} {AXES[lines.over]}", tuple(of)))
    speed, read = speed_of(lines)
    columns: tuple[Column[TableLine], ...] = (
        Column("", lambda line: line.name, name="line"),
        Column(speed, lambda line: read(line.cell), number, absent=_without_time),
        Column("GiB", lambda line: memory_gib(line.cell), gib),
        Column("time", lambda line: line.beside and line.beside.words, absent=lambda line: ""),
        Column(
            "grade", lambda line: line.grade and line.grade.words, absent=lambda line: UNFAIR if line.beside else ""
        ),
    )
    beside = [line for group in groups for line in group.lines if line.beside]
    marks = {line.grade.mark if line.grade else UNFAIR for line in beside}
    grades = "; ".join(filter(None, [legend(marks), *(f"{m}, {why}" for m, why in UNGRADED.items() if m in marks)]))
    about = f"GiB: peak of a GPU. Time: of a step, over that of {first.name}. {replicates(lines)}{apart(lines)}"
    return Table(shared(lines), about + (f" Grades: {grades}." if grades else ""), columns, tuple(groups))


VALUES: tuple[Column[TableLine], ...] = (
    Column("", lambda line: line.name, name="line"),
    *(Column("", lambda line, n=name: line.cell.asked[n], name=name) for name in ("method", "kernel", "sp_size")),
    Column("", lambda line: line.cell.asked["seq_len"], name="seq_len"),
    Column("", lambda line: len(line.cell.step_ms), name="replicates"),
    Column("", lambda line: line.cell.median_step_ms, name="median_step_ms"),
    Column("", lambda line: tokens_per_s_per_gpu(line.cell), name="tokens_per_s_per_gpu"),
    Column("", lambda line: tflops(line.cell), name="tflops_per_gpu"),
    Column("", lambda line: memory_gib(line.cell), name="peak_gib"),
    Column("", lambda line: line.beside and line.beside.ratio, name="ratio_to_first"),
    Column("", lambda line: (found := _interval(line)) and found.low, name="ratio_to_first_low"),
    Column("", lambda line: (found := _interval(line)) and found.high, name="ratio_to_first_high"),
    Column("", lambda line: line.grade and line.grade.mark, name="grade"),
)  # of each line, in CSV


def _beside(under: Cell | None, cell: Cell) -> Difference | None:
    """None where it is the first line itself, where either has no time, and where no replicates pair."""
    if under is None or under is cell or not (under.ok and cell.ok):
        return None
    found = Difference(under, cell)
    return None if found.ratio is None else found


def _interval(line: TableLine) -> Interval | None:
    paired = line.beside and line.beside.paired
    return paired.interval if paired else None


def _without_time(line: TableLine) -> str:
    return "out of memory" if line.cell.out_of_memory else MISSING
