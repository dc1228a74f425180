"""The section on where the time of an attention step goes: a sentence a cell, a table and a figure a setting."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from sp_bench.report.cells import Cell
from sp_bench.report.figures import MAX_SETTINGS
from sp_bench.report.figures.attribution import CAPTION as FIGURE_CAPTION
from sp_bench.report.figures.attribution import draw_time_parts
from sp_bench.report.figures.drawings import Drawing, finish
from sp_bench.report.figures.styles import Style
from sp_bench.report.formats import MISSING, counted, number, whole
from sp_bench.report.page.parts import Line, Section, Table
from sp_bench.report.ratios import by_medians, paired_ratio
from sp_bench.report.time_parts import Attribution, attributions, largest

HEAD = (
    *("method", "sp_size", "seq_len (tokens)", "kernel alone (ms)", "compute only (ms)", "step (ms)", "comm only (ms)"),
    *("alone / step", "compute beyond the kernel (ms)", "exposed communication (ms)", "overlap efficiency"),
)
CAPTION = (
    "Kernel alone: the same kernel on one device with the whole sequence and 1/P of the heads. Compute only: the same "
    "step with its messages replaced by local copies. Comm only: the same step without attention kernels. Compute "
    "beyond the kernel = compute only - kernel alone: uneven ranks, smaller blocks, merges and copies. Exposed "
    "communication = step - compute only. Overlap efficiency = 1 - exposed / comm only. Medians over replicates."
)


def section(cells: Sequence[Cell], style: Mapping[str, Style]) -> Section | None:
    by_setting = {setting: list(group) for setting, group in groupby(attributions(cells), key=lambda a: a.cell.setting)}
    if not by_setting:
        return None
    taken: set[str] = set()
    drawn = sorted(sorted(by_setting, key=lambda s: -len(by_setting[s]))[:MAX_SETTINGS])
    return Section(
        anchor="attribution",
        title="Where the time goes",
        points=tuple(_words(a) for group in by_setting.values() for a in _by_time(largest(group))),
        drawings=tuple(_drawing(by_setting[s], style, taken) for s in drawn),
        tables=tuple(Table(s, CAPTION, HEAD, tuple(map(_line, group))) for s, group in by_setting.items()),
    )


def _by_time(group: Sequence[Attribution]) -> list[Attribution]:
    return sorted(group, key=lambda a: (a.cell.median_step_ms or 0.0, a.cell.series))


def _drawing(group: Sequence[Attribution], style: Mapping[str, Style], taken: set[str]) -> Drawing:
    made = draw_time_parts(group, style), FIGURE_CAPTION
    return finish("attribution", group[0].cell.setting, group[0].cell, made, taken)


def _words(a: Attribution) -> str:
    cell, asked = a.cell, a.cell.asked
    heads = f"{whole(asked['num_heads'])}/{whole(asked['num_kv_heads'])} heads"
    sentence = f"{whole(asked['seq_len'])} tokens, {heads}, {counted(asked['sp_size'], 'rank')}, {asked['fabric']}, "
    sentence += f"{asked['pass_kind']}: {cell.series} takes {_ms(cell.median_step_ms)}"
    if a.alone is not None:
        paired = paired_ratio(a.alone, cell)
        evidence = f"coverage {paired.interval.coverage:.1%}" if paired else by_medians(a.alone, cell)
        sentence += f", {a.fraction} of the speed of the kernel alone, {_ms(a.alone_ms)} ({evidence})"
    if a.beyond_kernel_ms is not None:
        sentence += f"; {_ms(a.beyond_kernel_ms)} is compute beyond the kernel"
    if a.exposed_ms is not None:
        sentence += f"; {_ms(a.exposed_ms)} is exposed communication"
        sentence += f", which alone takes {_ms(a.comm_only_ms)}" if a.comm_only_ms is not None else ""
    return f"{sentence}."


def _ms(value: float | None) -> str:
    return f"{number(value)} ms"


def _line(a: Attribution) -> Line:
    overlap = MISSING if a.overlap_efficiency is None else f"{a.overlap_efficiency:.2f}"
    texts = (
        *(a.cell.series, whole(a.cell.asked["sp_size"]), whole(a.cell.asked["seq_len"])),
        *map(number, (a.alone_ms, a.compute_only_ms, a.cell.median_step_ms, a.comm_only_ms)),
        *(a.fraction, number(a.beyond_kernel_ms), number(a.exposed_ms), overlap),
    )
    alone = tuple(f"kernel alone: {file}" for file in a.alone.files) if a.alone else ()
    return Line(texts, (*a.cell.files, *alone))
