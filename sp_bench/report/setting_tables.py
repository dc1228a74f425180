"""Tables with one line per cell: of settings, ladders, packed documents, the longest sequence that fits, and stacks net
of their baseline. CSV and JSON have the same lines as values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sp_bench.analysis import documents, words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.documents import Packs
from sp_bench.analysis.ladder import Ladder, covered, ladders
from sp_bench.analysis.limits import Limit, capacity_gib
from sp_bench.analysis.longest import Longest, ends, is_fit_only, longest, tries
from sp_bench.analysis.metrics import host_gib, memory_gib, mj_per_token, sent_gib, tflops, tokens_per_s_per_gpu, work
from sp_bench.analysis.ratios import by_speed
from sp_bench.analysis.scaling import NetRatio, Scaling, Scalings, scalings
from sp_bench.analysis.settings import Difference, Setting, is_baseline, leader, place_key
from sp_bench.config.options import OPTIONS, Option
from sp_bench.formats import MISSING, gib, number
from sp_bench.report.table import Column, Group, Table
from sp_bench.rows.names import short_name


@dataclass(frozen=True, kw_only=True)
class Line:
    """A cell in a table, and what it is compared with there."""

    setting: Setting
    cell: Cell
    name: str
    ratio: Difference | None = None  # of the step time to that of the first of its group
    bold: bool = False  # proven faster than every other method of its group
    doubts: str = ""

    @cached_property
    def share(self) -> Difference | None:
        """The kernel alone's step time over the cell's."""
        return self.setting.share(self.cell)


@dataclass(frozen=True, kw_only=True)
class LimitLine(Line):
    limit: Limit


@dataclass(frozen=True, kw_only=True)
class PackedLine(Line):
    packs: Packs


@dataclass(frozen=True, kw_only=True)
class ScaledLine(Line):
    scaling: Scaling
    net: NetRatio


FAILED = {"oom": "out of memory", "ok": "fits"}  # of cells without a time


def rate_of(cell: Cell) -> float | None:
    """tokens/s per GPU. None for a kernel alone, which computes one rank's share of the work on all tokens."""
    return None if is_baseline(cell) else tokens_per_s_per_gpu(cell)


def _of_cell(
    head: str, read: Callable[[Cell], Any], shown: Callable[[Any], str] = number, name: str = ""
) -> Column[Line]:
    """A column that reads a number of the cell; blank if the cell has no time."""
    return Column(head, lambda line: read(line.cell), shown, name, optional=True, absent=_blank)


def _of_longest(head: str, read: Callable[[Cell], Any], shown: Callable[[Any], str] = gib) -> Column[LimitLine]:
    """A column that reads a number of the longest sequence that fits."""
    return Column(head, lambda line: (ran := line.limit.largest_ok) and read(ran), shown, optional=True)


def _of_packs(head: str, read: Callable[[PackedLine], float | None]) -> Column[PackedLine]:
    return Column(head, read, number, optional=True, absent=_blank)


def _on_several(column: str) -> Callable[[Cell], float | None]:
    """Reads a column that has no meaning on one rank: None there."""
    return lambda cell: cell.middle(column) if (cell.asked["world_size"] or 1) > 1 else None


def _blank(line: Line) -> str:
    return MISSING if line.cell.ok else ""


def _without_time(line: Line) -> str:
    return ", ".join(FAILED.get(status, status) for status in line.cell.statuses)


def _percent(value: float) -> str:
    return f"{value:.1%}"


METHOD: Column[Line] = Column("Method", lambda line: line.name)
MS: Column[Line] = Column("ms", lambda line: line.cell.median_step_ms, number, "median_step_ms", absent=_without_time)
RATE = _of_cell("tokens/s/{ranks}", rate_of, name="tokens_per_s_per_gpu")
TOKENS = _of_cell("tokens/s/{ranks}", tokens_per_s_per_gpu)
TFLOPS = _of_cell("TFLOP/s/{ranks}", tflops, name="tflops_per_gpu")
MFU = _of_cell("MFU", lambda cell: cell.mfu, _percent, "mfu")
FLOAT8_MFU = _of_cell("of FP8's peak", lambda cell: cell.middle("float8_mfu"), _percent)
SHARE: Column[Line] = Column(
    "of the kernel", lambda line: line.share and line.share.ratio, "{:.3f}".format, "share_of_kernel", optional=True
)
LIMIT = _of_cell("of the limit", lambda cell: cell.middle("share_of_limit"), "{:.2f}".format, "share_of_limit")
WORK = _of_cell("work", work, "{:.2f}".format)
PEAK = _of_cell("peak GiB", memory_gib, gib, "peak_gib")
PREDICTED = _of_cell("predicted GiB", lambda cell: cell.predicted_gib if cell.ok else None, gib)
HOST = _of_cell("host GiB", host_gib, gib)
SENT = _of_cell("GiB sent", sent_gib, gib, "sent_gib")
ENERGY = _of_cell("mJ/token", lambda cell: None if is_baseline(cell) else mj_per_token(cell), name="mj_per_token")
RATIO: Column[Line] = Column(
    "ratio to the first", lambda line: line.ratio, lambda ratio: ratio.words, optional=True, absent=lambda line: ""
)

CELLS = (METHOD, MS, RATE, TFLOPS, MFU, FLOAT8_MFU, SHARE, LIMIT, PEAK, SENT, ENERGY, RATIO)
RUNGS = (MS, RATE, TFLOPS, MFU, FLOAT8_MFU, SHARE, LIMIT, WORK, PEAK, PREDICTED, HOST, SENT, ENERGY, RATIO)
PACKED: tuple[Column[Any], ...] = (
    *(METHOD, MS, TOKENS, TFLOPS),
    _of_cell("imbalance", _on_several("flops_imbalance")),
    _of_cell("exposed ms", _on_several("exposed_comm_ms")),
    Column(
        "time, of one document's", lambda line: line.packs.time_ratio(line.cell), number, optional=True, absent=_blank
    ),
    Column(
        "work, of one document's", lambda line: line.packs.work_ratio(line.cell), number, optional=True, absent=_blank
    ),
    RATIO,
)
LIMITS: tuple[Column[LimitLine], ...] = (
    Column("fits", lambda line: ends(line.limit)[0] + (" (fit only)" if is_fit_only(line.limit) else "")),
    Column("does not fit", lambda line: ends(line.limit)[1]),
    Column("tries", lambda line: tries(line.limit)),
    _of_longest("peak GiB", memory_gib),
    _of_longest("predicted GiB", lambda cell: cell.predicted_gib),
    Column("device GiB", lambda line: capacity_gib(line.cell), gib, optional=True),
    _of_longest("tokens/s/{ranks}", rate_of, number),
)
SCALINGS: tuple[Column[Any], ...] = (
    *(METHOD, MS),
    Column("baseline", lambda line: line.scaling.baseline),
    Column("its ms", lambda line: line.scaling.alone.median_step_ms, number),
    TOKENS,
    Column("of its speed a GPU", lambda line: line.scaling.words),
    Column("net ratio to the first", lambda line: line.net, lambda net: net.words),
)

CAPTION = (
    "Medians over replicates. Ratio: step time over that of the first line of its group, by replicates that pair (of "
    "one campaign and machine), with an interval from 6 pairs on; a dash where there are none."
)
LONGEST_CAPTION = (
    "Where memory runs out, as a bracket. At least, not reached: nothing longer has a row that says whether it fits. "
    "Host memory: that of the machine ran out, not a device's. Tries: how often each of its ends was tried; one that "
    "was tried once is not confirmed. Peak, prediction and speed are of the longest that fits. The prediction is of "
    "the memory model of the code that ran. Fit only: most layers' attention was left out of the step, which "
    "allocates and sends all the same."
)
LADDER_CAPTION = (
    f"{CAPTION} Work: FLOPs that ran over those of the model; above 1, because something is computed again, if only "
    "scores in the kernel's backward. Peaks are of the rank that needs most; the prediction is of tensors alone. One "
    "step: a single step was timed, so its ratio is of one step of each replicate, without an interval below 6 of them."
)
PACKED_CAPTION = (
    "Medians over replicates. Imbalance: attention FLOPs of the rank that computes most, over the mean, as predicted. "
    "Exposed: the part of the step that communication adds. Work: model FLOPs, of which only visible pairs count. "
    "Ratio: step time over that of the first line of its group, with an interval from 6 replicates on."
)
SCALING_CAPTION = (
    "Medians over replicates. Baseline: the same stack's step with a sequence of the same length a GPU, on the same "
    "kernel and with the same options. Of its speed: tokens/s a GPU over those of the baseline. Net ratio: the first "
    "line's share over this line's. It is how much slower this stack is than the first beyond what it is slower on its "
    "baseline. Intervals from 6 replicates on."
)


def tables(settings: Sequence[Setting]) -> list[Table[Any]]:
    """The table of the longest sequences, those of ladders, packed documents and stacks net of their baseline, then one
    per setting that none of them covers. A setting with a single line has no table."""
    found = [] if (where := longest(settings)) is None else [_longest_table(where)]
    rungs, packed = ladders(settings), documents.packs(settings)
    found += [_ladder_table(ladder) for ladder in rungs]
    found += [_packed_table(each) for each in packed]
    found += [_scaling_table(each) for each in scalings(settings)]
    others = [each for each in settings if not (covered(each, rungs) or documents.covered(each, packed))]
    return [*found, *(table for setting in others if len((table := _table(setting)).lines) > 1)]


def _made(setting: Setting, caption: str, columns: Sequence[Column[Any]], groups: Sequence[Group[Any]]) -> Table[Any]:
    ranks = "GPU" if any(cell.processor == "GPU" for cell in setting.cells) else "rank"
    named = tuple(replace(column, head=column.head.format(ranks=ranks)) for column in columns)
    return Table(
        setting.title, caption, named, tuple(groups), style="setting", links=True,
        bold=lambda line: line.bold, doubts=lambda line: line.doubts,
    )  # fmt: skip


def _of_options(paths: Sequence[str]) -> list[Column[Line]]:
    """The columns of options in which the lines of a table differ."""

    def read(path: str) -> Callable[[Line], str]:
        return lambda line: words.in_column(path, line.cell.options.get(path))

    return [Column(words.STEP_COLUMNS[path], read(path)) for path in paths]


def _longest_table(found: Longest) -> Table[Any]:
    named = zip(found.short_names, found.limits, strict=True)
    lines = tuple(
        LimitLine(setting=found.setting, cell=limit.cells[0], name=name, limit=limit) for name, limit in named
    )
    title = "the longest sequence that fits, and the shortest that does not, in tokens"
    columns = (METHOD, *_of_options(found.columns), *LIMITS)
    return _made(found.setting, LONGEST_CAPTION, columns, [Group(title, lines)])


def _ladder_table(ladder: Ladder) -> Table[Any]:
    """The fastest first, what failed last."""
    setting, cells = ladder.setting, ladder.measured
    failed = [cell for cell in setting.cells if not cell.ok]
    names = ladder.short_names
    first = next(iter(ladder.compared), None)
    lines = [_line(setting, cell, first, names[cell.cell_id]) for cell in cells]
    lines += [_line(setting, cell, None, names[cell.cell_id]) for cell in failed]
    columns = (METHOD, *_of_options(ladder.columns), *RUNGS)
    return _made(setting, LADDER_CAPTION, columns, [Group(ladder.where, tuple(lines))])


def _packed_table(packs: Packs) -> Table[Any]:
    groups = []
    for title, cells in packs.distributions.items():
        first = next((cell for cell in cells if cell.ok and cell.is_comparable), None)
        groups.append(
            Group(title, tuple(PackedLine(**vars(_line(packs.setting, cell, first)), packs=packs) for cell in cells))
        )
    return _made(packs.setting, PACKED_CAPTION, PACKED, groups)


def _scaling_table(found: Scalings) -> Table[Any]:
    lines = tuple(
        ScaledLine(
            setting=found.setting,
            cell=each.cell,
            name=found.names[each.cell.cell_id],
            scaling=each,
            net=found.net_ratio(each),
        )
        for each in found.lines
    )
    return _made(found.setting, SCALING_CAPTION, SCALINGS, [Group(found.place, lines)])


def _table(setting: Setting) -> Table[Any]:
    grouped: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in setting.cells:
        # the kernels alone of a campaign of kernels are compared with each other
        key = place_key(cell)[:-1] if is_baseline(cell) else place_key(cell)
        grouped.setdefault(tuple(str(part) for part in key), []).append(cell)
    for cell in setting.cells:
        if (alone := setting.alone.get(cell.cell_id)) is not None:
            group = grouped[tuple(str(part) for part in place_key(cell))]
            group += [] if alone in group else [alone]
    of_place = {id(place.first): n for n, place in enumerate(reversed(setting.places))}
    timed = [cells for cells in grouped.values() if not all(_is_probe(cell) for cell in cells)]
    ordered = sorted(timed, key=lambda g: (min(of_place.get(id(c), 999) for c in g), str(place_key(g[0]))))
    return _made(setting, CAPTION, CELLS, [_group(setting, cells) for cells in ordered])


def _is_probe(cell: Cell) -> bool:
    """Whether it is a probe of the longest length; that table has its bracket."""
    return not cell.ok and (cell.fits or cell.out_of_memory)


def _group(setting: Setting, cells: Sequence[Cell]) -> Group[Line]:
    """The leader first, the others by speed, then kernels alone, then cells that failed."""
    own = [
        c for c in cells if c.ok and not (is_baseline(c) and c.cell_id in {a.cell_id for a in setting.alone.values()})
    ]
    alone = [c for c in cells if c.ok and c not in own]
    compared = [cell for cell in own if cell.is_comparable]
    first = leader(compared, setting.smallest_for(own[0])) if compared else None
    ranked = sorted(own, key=lambda cell: (cell is not first, *by_speed(cell)))
    lines = [_line(setting, cell, first) for cell in ranked]
    lines += [_line(setting, cell, None) for cell in sorted(alone, key=by_speed)]
    rivals = [
        line.ratio for line in lines if line.ratio and line.cell.asked["method"] != (first and first.asked["method"])
    ]
    if rivals and all(rival.is_proven for rival in rivals):
        lines[0] = replace(lines[0], bold=True)
    lines += [_line(setting, cell, None) for cell in cells if not cell.ok]
    place = next(c for c in [*ranked, *cells])
    parts = [words.place(place)]
    parts.append(words.fabric(place.asked["fabric"]) if (place.asked["world_size"] or 1) > 1 else "")
    parts.append("" if is_baseline(place) else words.kernel(place))
    return Group(", ".join(filter(None, parts)), tuple(lines))


def _line(setting: Setting, cell: Cell, first: Cell | None, name: str = "") -> Line:
    """A cell's line, with its ratio to the first of its group if both have a time."""
    ratio = Difference(first, cell, setting.smallest_for(cell)) if cell.ok and first not in (None, cell) else None
    doubts = "; ".join(words.FLAGS.get(flag, flag) for flag in cell.flags)
    return Line(
        setting=setting, cell=cell, name=(name or words.method(cell)) + words.bound(cell), ratio=ratio, doubts=doubts
    )


# The options that distinguish cells. Left out: how a cell is measured; mappings, which titles name; and options of a
# model without a column, which the model's name implies.
DISTINGUISHING = tuple(
    option
    for option in OPTIONS
    if not (option.protocol or issubclass(option.type, Mapping) or (option.group == "model" and not option.column))
)


def _value(name: str, read: Callable[[Line], Any]) -> Column[Line]:
    return Column("", read, name=name)


def _set(option: Option) -> Column[Line]:
    """The option's value; None if it was not set, or if the method or engine does the same without it."""

    def read(line: Line) -> Any:
        value = line.cell.options.get(option.path)
        return None if option.none_means != option.old_rows and value == option.none_means else value

    return _value(short_name(option.path), read)


def _of_scaled(name: str, read: Callable[[ScaledLine], Any]) -> Column[Line]:
    return _value(name, lambda line: read(line) if isinstance(line, ScaledLine) else None)


def _bounds(name: str, interval: Callable[[Line], Any]) -> list[Column[Line]]:
    def read(bound: str) -> Callable[[Line], float | None]:
        return lambda line: getattr(interval(line), bound, None)

    return [_value(f"{name}_{bound}", read(bound)) for bound in ("low", "high")]


def _interval_of(difference: Any) -> Any:
    return difference.paired.interval if difference and difference.paired else None


VALUES: tuple[Column[Line], ...] = (
    _value("setting", lambda line: line.setting.title),
    _value("campaigns", lambda line: " ".join(sorted({str(row["folder"]) for row in line.cell.rows}))),
    _value("name", lambda line: words.method(line.cell)),
    *map(_set, DISTINGUISHING),
    _value("world_size", lambda line: line.cell.asked["world_size"]),
    _value("evidence", lambda line: line.cell.asked["evidence"]),
    _value("status", lambda line: " ".join(line.cell.statuses)),
    _value("replicates", lambda line: len(line.cell.step_ms)),
    MS,
    *_bounds("step_ms", lambda line: line.cell.interval_ms),
    *(RATE, TFLOPS, MFU, SHARE, LIMIT),
    *_bounds("share_of_kernel", lambda line: _interval_of(line.share)),
    *(PEAK, SENT, ENERGY),
    _value("ratio_to_first", lambda line: line.ratio and line.ratio.ratio),
    *_bounds("ratio_to_first", lambda line: _interval_of(line.ratio)),
    _value("grade", lambda line: line.ratio.grade.mark if line.ratio and line.ratio.ratio is not None else None),
    _of_scaled("baseline", lambda line: line.scaling.baseline),
    _of_scaled("baseline_step_ms", lambda line: line.scaling.alone.median_step_ms),
    _of_scaled("scaling_efficiency", lambda line: line.scaling.efficiency),
    *_bounds("scaling_efficiency", lambda line: line.scaling.interval if isinstance(line, ScaledLine) else None),
    _of_scaled("net_ratio_to_first", lambda line: line.net.ratio),
    *_bounds("net_ratio_to_first", lambda line: _interval_of(line.net) if isinstance(line, ScaledLine) else None),
    _value("flags", lambda line: " ".join(line.cell.flags)),
    _value("cell_id", lambda line: line.cell.cell_id),
)  # of each line, in CSV and JSON


def lines(tables: Sequence[Table[Any]]) -> list[Line]:
    return [line for table in tables for line in table.lines]
