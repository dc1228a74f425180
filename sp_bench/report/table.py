"""The one table of a setting, a line a cell, grouped by place, and those of ladders and of packed documents; as values,
CSV, JSON, Markdown and LaTeX."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from sp_bench.analysis import documents, words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.formats import GIB, MISSING, escape_markdown, number
from sp_bench.analysis.ladder import Ladder, covered, ladders
from sp_bench.analysis.limits import capacity_gib
from sp_bench.analysis.longest import Longest, ends, is_fit_only, longest, tries
from sp_bench.analysis.ratios import PairedRatio, by_speed, times
from sp_bench.analysis.scaling import Scaling, Scalings, scalings
from sp_bench.analysis.settings import Difference, Setting, is_baseline, leader, place_key
from sp_bench.config.options import OPTIONS, Option
from sp_bench.report.cards import gib, memory_gib, sent_gib, tflops, tokens
from sp_bench.report.latex_text import escape
from sp_bench.rows.names import short_name

HEADS = (
    "Method",
    "ms",
    "tokens/s/{ranks}",
    "TFLOP/s/{ranks}",
    "MFU",
    "of the kernel",
    "of the limit",
    PEAK := "peak GiB",
    "GiB sent",
    "ratio to the first",
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
LADDER_HEADS = (*HEADS[:7], "work", PEAK, "predicted GiB", "host GiB", *HEADS[8:])
LADDER_CAPTION = (
    f"{CAPTION} Work: FLOPs that ran over those of the model; above 1, because something is computed again, if only "
    "scores in the kernel's backward. Peaks are of the rank that needs most; the prediction is of tensors alone. One "
    "step: a single step was timed, so its ratio is of one step of each replicate, without an interval below 6 of them."
)
PACKED_HEADS = (
    *("Method", "ms", "tokens/s/{ranks}", "TFLOP/s/{ranks}", "imbalance", "exposed ms"),
    *("time, of one document's", "work, of one document's", "ratio to the first"),
)
PACKED_CAPTION = (
    "Medians over replicates. Imbalance: attention FLOPs of the rank that computes most, over the mean, as predicted. "
    "Exposed: the part of the step that communication adds. Work: model FLOPs, of which only visible pairs count. "
    "Ratio: step time over that of the first line of its group, with an interval from 6 replicates on."
)
SCALING_HEADS = ("Method", "ms", "baseline", "its ms", "tokens/s/GPU", "of its speed a GPU", "net ratio to the first")
SCALING_CAPTION = (
    "Medians over replicates. Baseline: the same stack's step with a sequence of the same length a GPU, on the same "
    "kernel and with the same options. Of its speed: tokens/s a GPU over those of the baseline. Net ratio: the first "
    "line's share over this line's. It is how much slower this stack is than the first beyond what it is slower on its "
    "baseline. Intervals from 6 replicates on."
)
WIDEST_NAME = 70  # characters of a first column, beyond which its lines are broken
PAGE_LINES = 45  # of a table, from which on it is broken over pages
# What tells cells apart, as values: all options but how a cell is measured, and but mappings, which titles name. Of a
# model those that rows have columns for: its name says the others.
TOLD = tuple(
    option
    for option in OPTIONS
    if not (option.protocol or issubclass(option.type, Mapping) or (option.group == "model" and not option.column))
)
FAILED = {"oom": "out of memory", "ok": "fits"}  # of cells without a time


@dataclass(frozen=True)
class Line:
    cell: Cell
    texts: tuple[str, ...]  # one a column
    ratio: Difference | None  # of the step time to that of the first of its group
    share: Difference | None  # the kernel alone's step time over the cell's
    bold: bool = False  # proven faster than every other method of its group
    doubts: str = ""
    scaling: tuple[Scaling, float, PairedRatio | None] | None = None  # with the net ratio


@dataclass(frozen=True)
class Group:
    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class SettingTable:
    setting: Setting
    heads: tuple[str, ...]
    groups: tuple[Group, ...]
    caption: str = CAPTION

    @property
    def num_lines(self) -> int:
        return sum(len(group.lines) for group in self.groups)


def tables(settings: Sequence[Setting]) -> list[SettingTable]:
    """One of where memory runs out, one a ladder, one of packed documents, one of stacks net of their baseline, and
    one a setting that none of these shows; columns of which no line knows anything are left out. A setting of a single
    line has none."""
    found = [] if (where := longest(settings)) is None else [_longest_table(where)]
    rungs, packed = ladders(settings), documents.packs(settings)
    found += [_ladder_table(ladder) for ladder in rungs]
    found += [_packed_table(each) for each in packed]
    found += [_scaling_table(each) for each in scalings(settings)]
    others = [each for each in settings if not (covered(each, rungs) or documents.covered(each, packed))]
    return [*found, *(table for setting in others if (table := _table(setting)).num_lines > 1)]


def _longest_table(found: Longest) -> SettingTable:
    lines = []
    for name, limit in zip(found.short_names, found.limits, strict=True):
        ran, first = limit.largest_ok, limit.cells[0]
        fits, fails = ends(limit)
        peak, predicted = (None, None) if ran is None else (memory_gib(ran), ran.predicted_gib)
        sizes = [MISSING if size is None else gib(size) for size in (peak, predicted, capacity_gib(first))]
        rate = None if ran is None else rate_of(ran)
        fit_only = " (fit only)" if is_fit_only(limit) else ""
        options = _in_columns(first, found.columns)
        texts = (name, *options, fits + fit_only, fails, tries(limit), *sizes, number(rate))
        lines.append(Line(first, texts, None, None))
    heads = ("Method", *(words.STEP_COLUMNS[path] for path in found.columns), "fits", "does not fit", "tries")
    heads += ("peak GiB", "predicted GiB", "device GiB", "tokens/s/GPU")
    ranks = "GPU" if any(c.processor == "GPU" for c in found.setting.cells) else "rank"
    first = 3 + len(found.columns)
    kept = [i for i in range(len(heads)) if i < first or any(line.texts[i] != MISSING for line in lines)]
    lines = [replace(line, texts=tuple(line.texts[i] for i in kept)) for line in lines]
    shown = tuple(heads[i].replace("GPU", ranks) for i in kept)
    title = "the longest sequence that fits, and the shortest that does not, in tokens"
    return SettingTable(found.setting, shown, (Group(title, tuple(lines)),), LONGEST_CAPTION)


def _ladder_table(ladder: Ladder) -> SettingTable:
    """The fastest first, what failed last."""
    setting, cells = ladder.setting, ladder.measured
    ratios = [None, *(Difference(cells[0], cell, setting.smallest) for cell in cells[1:])]
    lines = [_line(setting, cell, ratio) for cell, ratio in zip(cells, ratios, strict=True)] if cells else []
    rungs = [replace(line, texts=_of_rung(line)) for line in lines]
    rungs += [_failed(cell, LADDER_HEADS) for cell in setting.cells if not cell.ok]
    named = []
    for line in rungs:
        options = _in_columns(line.cell, ladder.columns)
        texts = (ladder.short_names[line.cell.cell_id], *options, *line.texts[1:])
        named.append(replace(line, texts=texts))
    heads = (LADDER_HEADS[0], *(words.STEP_COLUMNS[path] for path in ladder.columns), *LADDER_HEADS[1:])
    return replace(_without_empty(setting, [Group(ladder.where, tuple(named))], heads), caption=LADDER_CAPTION)


def _in_columns(cell: Cell, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(words.in_column(path, cell.options.get(path)) for path in columns)


def _of_rung(line: Line) -> tuple[str, ...]:
    """By LADDER_HEADS. On a CPU the peak is the host's."""
    cell, n = line.cell, HEADS.index(PEAK)
    ran, of_model, predicted = map(cell.middle, ("hardware_flops", "model_flops", "predicted_peak_bytes"))
    host = cell.largest("max_peak_host_bytes") if cell.memory_column != "max_peak_host_bytes" else None
    sizes = (MISSING if size is None else gib(size / GIB) for size in (predicted, host))
    work = f"{ran / of_model:.2f}" if ran and of_model else MISSING
    return (*line.texts[:n], work, line.texts[n], *sizes, *line.texts[n + 1 :])


def _packed_table(packs: documents.Packs) -> SettingTable:
    groups = []
    for title, cells in packs.distributions.items():
        first = next((cell for cell in cells if cell.ok), None)
        lines = [_packed_line(packs, cell, first) if cell.ok else _failed(cell, PACKED_HEADS) for cell in cells]
        groups.append(Group(title, tuple(lines)))
    return replace(_without_empty(packs.setting, groups, PACKED_HEADS), caption=PACKED_CAPTION)


def _packed_line(packs: documents.Packs, cell: Cell, first: Cell | None) -> Line:
    ratio = None if first is None or first is cell else Difference(first, cell, packs.setting.smallest)
    on_several = (cell.asked["world_size"] or 1) > 1
    texts = (
        words.method(cell),
        number(cell.median_step_ms),
        number(tokens(cell)),
        number(tflops(cell)),
        *(number(cell.middle(column) if on_several else None) for column in ("flops_imbalance", "exposed_comm_ms")),
        number(packs.time_ratio(cell)),
        number(packs.work_ratio(cell)),
        "" if ratio is None else ratio.words,
    )
    return Line(cell, texts, ratio, None, doubts="; ".join(words.FLAGS.get(flag, flag) for flag in cell.flags))


def _scaling_table(found: Scalings) -> SettingTable:
    lines = []
    for each in found.lines:
        net, paired = found.net_ratio(each)
        cell = each.cell
        texts = (
            found.names[cell.cell_id],
            number(cell.median_step_ms),
            each.baseline,
            *map(number, (each.alone.median_step_ms, tokens(cell))),
            with_bounds(each),
            "" if each is found.lines[0] else paired.words if paired else times(net),
        )
        lines.append(Line(cell, texts, None, None, scaling=(each, net, paired)))
    title = ", ".join(found.setting.parts[-3:-1])
    return SettingTable(found.setting, SCALING_HEADS, (Group(title, tuple(lines)),), SCALING_CAPTION)


def with_bounds(scaling: Scaling) -> str:
    """0.953 [0.950, 0.956]."""
    interval = "" if scaling.bounds is None else f" [{', '.join(f'{bound:.3f}' for bound in scaling.bounds)}]"
    return f"{scaling.efficiency:.3f}{interval}"


def _table(setting: Setting) -> SettingTable:
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
    told = [cells for cells in grouped.values() if not all(_says_memory_alone(cell) for cell in cells)]
    ordered = sorted(told, key=lambda g: (min(of_place.get(id(c), 999) for c in g), str(place_key(g[0]))))
    return _without_empty(setting, [_group(setting, cells) for cells in ordered])


def _says_memory_alone(cell: Cell) -> bool:
    """A probe of the longest length, whose bracket stands in the table of it."""
    return not cell.ok and (cell.fits or cell.out_of_memory)


def _without_empty(setting: Setting, groups: list[Group], heads: Sequence[str] = HEADS) -> SettingTable:
    """The groups without the columns of which no line knows anything."""
    ranks = "GPU" if any(c.processor == "GPU" for c in setting.cells) else "rank"
    heads = [head.format(ranks=ranks) for head in heads]
    lines = [line for group in groups for line in group.lines]
    kept = [i for i in range(len(heads)) if i < 2 or any(line.texts[i] not in ("", MISSING) for line in lines)]
    for k, group in enumerate(groups):
        shown = tuple(replace(line, texts=tuple(line.texts[i] for i in kept)) for line in group.lines)
        groups[k] = Group(group.title, shown)
    return SettingTable(setting, tuple(heads[i] for i in kept), tuple(groups))


def _group(setting: Setting, cells: Sequence[Cell]) -> Group:
    """What the others are compared with first, then by speed, the kernel alone and what failed last."""
    own = [
        c for c in cells if c.ok and not (is_baseline(c) and c.cell_id in {a.cell_id for a in setting.alone.values()})
    ]
    alone = [c for c in cells if c.ok and c not in own]
    first = leader(own, setting.smallest) if own else None
    ranked = sorted(own, key=lambda cell: (cell is not first, *by_speed(cell)))
    lines = []
    for cell in [*ranked, *sorted(alone, key=by_speed)]:
        ratio = (
            Difference(first, cell, setting.smallest)
            if first is not None and cell in ranked and cell is not first
            else None
        )
        lines.append(_line(setting, cell, ratio))
    rivals = [
        line.ratio for line in lines if line.ratio and line.cell.asked["method"] != (first and first.asked["method"])
    ]
    if rivals and all(r.paired is not None and r.outcome == "ahead" for r in rivals):
        lines[0] = Line(first or lines[0].cell, lines[0].texts, None, lines[0].share, True, lines[0].doubts)
    lines += [_failed(cell) for cell in cells if not cell.ok]
    place = next(c for c in [*ranked, *cells])
    parts = [words.place(place)]
    parts.append(words.fabric(place.asked["fabric"]) if (place.asked["world_size"] or 1) > 1 else "")
    parts.append("" if is_baseline(place) else words.kernel(place))
    return Group(", ".join(filter(None, parts)), tuple(lines))


def _line(setting: Setting, cell: Cell, ratio: Difference | None) -> Line:
    share = setting.share(cell)
    doubts = "; ".join(words.FLAGS.get(flag, flag) for flag in cell.flags)
    peak, sent, rate, flops = memory_gib(cell), sent_gib(cell), rate_of(cell), tflops(cell)
    texts = (
        words.method(cell),
        number(cell.median_step_ms),
        MISSING if rate is None else f"{rate:,.0f}" if rate >= 1000 else number(rate),
        number(flops),
        MISSING if cell.mfu is None else f"{cell.mfu:.1%}",
        MISSING if share is None or share.ratio is None else f"{share.ratio:.3f}",
        MISSING if (limit := cell.middle("share_of_limit")) is None else f"{limit:.2f}",
        MISSING if peak is None else gib(peak),
        MISSING if sent is None else gib(sent),
        "" if ratio is None else ratio.words,
    )
    return Line(cell, texts, ratio, share, False, doubts)


def rate_of(cell: Cell) -> float | None:
    """tokens/s of a GPU; None of a kernel alone, which has one rank's share of the work and not of the tokens."""
    return None if is_baseline(cell) else tokens(cell)


def _failed(cell: Cell, heads: Sequence[str] = HEADS) -> Line:
    why = ", ".join(FAILED.get(status, status) for status in cell.statuses)
    peak = "" if (held := memory_gib(cell)) is None else gib(held)  # of one that only fits
    texts = [peak if head == PEAK else "" for head in heads]
    return Line(cell, (words.method(cell), why, *texts[2:]), None, None)


def records(tables: Sequence[SettingTable]) -> list[dict[str, Any]]:
    """The lines as values, with identifiers: what CSV and JSON hold."""
    made = []
    for table in tables:
        for group in table.groups:
            for line in group.lines:
                made.append(_record(table.setting, line))
    return made


def _record(setting: Setting, line: Line) -> dict[str, Any]:
    cell, ratio, share = line.cell, line.ratio, line.share
    return {
        "setting": setting.title,
        "campaigns": " ".join(sorted({str(row["folder"]) for row in cell.rows})),
        "name": words.method(cell),
        **{short_name(option.path): _set(cell, option) for option in TOLD},
        "world_size": cell.asked["world_size"],
        "status": " ".join(cell.statuses),
        "replicates": len(cell.step_ms),
        "median_step_ms": cell.median_step_ms,
        **_bounds("step_ms", cell.interval_ms),
        "tokens_per_s_per_gpu": rate_of(cell),
        "tflops_per_gpu": tflops(cell),
        "mfu": cell.mfu,
        "share_of_kernel": share.ratio if share else None,
        "share_of_limit": cell.middle("share_of_limit"),
        **_bounds("share_of_kernel", share.paired.interval if share and share.paired else None),
        "peak_gib": memory_gib(cell),
        "sent_gib": sent_gib(cell),
        "ratio_to_first": ratio.ratio if ratio else None,
        **_bounds("ratio_to_first", ratio.paired.interval if ratio and ratio.paired else None),
        **_of_scaling(line),
        "flags": " ".join(cell.flags),
        "cell_id": cell.cell_id,
    }


def _of_scaling(line: Line) -> dict[str, Any]:
    scaling, net, paired = line.scaling or (None, None, None)
    low, high = (scaling.bounds if scaling else None) or (None, None)
    return {
        "baseline": scaling.baseline if scaling else None,
        "baseline_step_ms": scaling.alone.median_step_ms if scaling else None,
        "scaling_efficiency": scaling.efficiency if scaling else None,
        "scaling_efficiency_low": low,
        "scaling_efficiency_high": high,
        "net_ratio_to_first": net,
        **_bounds("net_ratio_to_first", paired.interval if paired else None),
    }


def _set(cell: Cell, option: Option) -> Any:
    """What the option was set to; None where it was not, or where a method or an engine does the same without it."""
    value = cell.options.get(option.path)
    return None if option.none_means != option.old_rows and value == option.none_means else value


def _bounds(name: str, interval: Any) -> dict[str, float | None]:
    return {f"{name}_low": interval.low if interval else None, f"{name}_high": interval.high if interval else None}


def as_csv(tables: Sequence[SettingTable]) -> str:
    """All tables under one head; empty where a value is not known."""
    found = records(tables)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]) if found else ["setting"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def as_json(tables: Sequence[SettingTable]) -> str:
    return json.dumps(records(tables), indent=1, allow_nan=False) + "\n"


EXPORTS = {"csv": as_csv, "json": as_json}


def markdown(tables: Sequence[SettingTable]) -> str:
    parts = []
    for table in tables:
        lines = []
        for group in table.groups:
            lines.append([f"*{escape_markdown(group.title)}*", *[""] * (len(table.heads) - 1)])
            lines += [
                [
                    f"**{escape_markdown(t)}**" if line.bold and i < 2 else escape_markdown(t)
                    for i, t in enumerate(line.texts)
                ]
                for line in group.lines
            ]
        grid = tabulate(
            lines,
            table.heads,
            tablefmt="pipe",
            disable_numparse=True,
            colalign=("left", *["right"] * (len(table.heads) - 1)),
        )
        parts.append(f"**{escape_markdown(table.setting.title)}.** {table.caption}\n\n{grid}\n")
    return "\n".join(parts)


def latex(tables: Sequence[SettingTable]) -> str:
    """A table* each, as wide as the page also where it has two columns. One longer than a page is a longtable, which
    LaTeX breaks, and which wants one column."""
    preamble = "% Needs \\usepackage{booktabs,longtable}. A longtable stands after \\onecolumn.\n"
    return preamble + "\n".join(map(_latex_table, tables))


def _latex_table(table: SettingTable) -> str:
    width = len(table.heads)
    longest = max((len(line.texts[0]) for group in table.groups for line in group.lines), default=0)
    first = r"p{0.42\textwidth}" if longest > WIDEST_NAME else "l"
    columns = rf"{{@{{}}{first}{'r' * (width - 1)}@{{}}}}"
    head = rf"\toprule {' & '.join(map(escape, table.heads))} \\ \midrule"
    caption = rf"\caption{{{escape(f'{table.setting.title}. {table.caption}')}}}"
    if table.num_lines + len(table.groups) > PAGE_LINES:
        opening = [r"{", rf"\begin{{longtable}}{columns}", rf"{caption}\\"]
        opening += [rf"{head} \endfirsthead", rf"{head} \endhead", r"\bottomrule \endfoot"]
        closing = [r"\end{longtable}}"]
    else:
        opening = [r"\begin{table*}", caption, rf"\centering\begin{{tabular}}{columns}", head]
        closing = [r"\bottomrule", r"\end{tabular}", r"\end{table*}"]
    lines = [*opening[:1], r"\footnotesize\setlength{\tabcolsep}{3pt}", *opening[1:]]
    for k, group in enumerate(table.groups):
        gap = r"\addlinespace " if k else ""
        lines.append(rf"{gap}\multicolumn{{{width}}}{{@{{}}l}}{{\emph{{{escape(group.title)}}}}} \\")
        for line in group.lines:
            texts = [rf"\textbf{{{escape(t)}}}" if line.bold and i < 2 else escape(t) for i, t in enumerate(line.texts)]
            lines.append(" & ".join(texts) + r" \\")
    return "\n".join([*lines, *closing]) + "\n"
