"""The longest sequence that fits, of each method and each set of options, where anything ran out of memory or trials
asked whether it does."""

from collections.abc import Sequence
from dataclasses import dataclass

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.limits import Limit
from sp_bench.analysis.settings import Setting
from sp_bench.config.trial import TRAINING
from sp_bench.formats import MISSING, whole

# What moves the edge of memory, and may be missing in titles
UNTITLED = ("kernel.name", "workload.model_code", "hardware.allocator")


def tries(limit: Limit) -> str:
    """1 and 2: how often the longest that fits was tried, and the shortest that does not."""
    return " and ".join(map(str, limit.tried))


NOT_REACHED = "not reached"  # the edge: nothing longer has a row that says whether it fits


def ends(limit: Limit) -> tuple[str, str]:
    """What fits, and what does not, in words: 374,784 and 387,072; at least 249,856 and not reached."""
    ran, failed = (cell and cell.asked["seq_len"] for cell in (limit.largest_ok, limit.smallest_oom))
    fits = f"at least {whole(ran)}" if limit.is_open else whole(ran)
    if failed is None:
        return fits, NOT_REACHED if limit.is_open else MISSING
    fails = f"{whole(failed)} ({limit.exhausted_memory})" if limit.exhausted_memory else whole(failed)
    return fits, f"{NOT_REACHED}, but {fails} did not fit" if limit.is_open else fails


def is_fit_only(limit: Limit) -> bool:
    """No whole step of the longest that fits was taken."""
    return limit.largest_ok is not None and not limit.largest_ok.ok


@dataclass(frozen=True)
class Longest:
    setting: Setting  # of the ends of the brackets, and of the longest that fit, alone
    limits: tuple[Limit, ...]
    names: tuple[str, ...]  # of each limit: method, kernel, number of ranks, and what tells it from the others
    short_names: tuple[str, ...]  # the same without `columns`
    columns: tuple[str, ...]  # options in which the limits differ, and for which a table has columns

    @property
    def title(self) -> str:
        return self.setting.title


def longest(settings: Sequence[Setting]) -> Longest | None:
    """None: nothing ran out of memory, and no trial asked whether a length fits."""
    found = [
        (setting, limit) for setting in settings for limit in setting.limits if setting.out_of_memory or limit.is_search
    ]
    if not found:
        return None
    shown = list({setting.title: setting for setting, _ in found}.values())
    shared = tuple(part for part in shown[0].parts if all(part in other.parts for other in shown))
    cells = tuple(cell for _, limit in found for cell in limit.cells)
    like = shown[0]
    ends = [limit.cells[0] for _, limit in found]
    moving = UNTITLED if ends[0].asked["workload"] in TRAINING else ()
    differing = [path for path in moving if len({str(cell.options.get(path)) for cell in ends}) > 1]
    shared += tuple(_said(ends[0], [path for path in moving if path not in differing], shared))
    setting = Setting(shared, cells, {}, like.fabrics, like.smallest)
    names = tuple(_name(setting_of, limit, shown, differing) for setting_of, limit in found)
    columns = words.step_columns(ends)
    told = [path for path in differing if path not in columns]
    short = tuple(_name(setting_of, limit, shown, told, columns) for setting_of, limit in found)
    return Longest(setting, tuple(limit for _, limit in found), names, short, tuple(columns))


def _name(
    setting: Setting, limit: Limit, shown: Sequence[Setting], differing: Sequence[str], left_out: Sequence[str] = ()
) -> str:
    """`left_out`: options that stand elsewhere."""
    cell = limit.cells[0]
    elsewhere = {words.option(path, cell.options.get(path)) for path in left_out}
    parts = [part for part in setting.apart(shown) if part not in elsewhere]
    parts += _said(cell, differing, parts)
    told = f"{words.method(cell, but=words.OF_LIMITS)}, {words.processors(cell)}"
    return f"{told}: {', '.join(parts)}" if parts else told


def _said(cell: Cell, paths: Sequence[str], beside: Sequence[str]) -> list[str]:
    """The values of these options, but for what stands there already."""
    found = []
    for path in paths:
        value = cell.options.get(path)
        if value not in (None, False) and (text := words.option(path, value)) not in beside:
            found.append(text)
    return found
