"""The longest sequence that fits, per method and set of options, if anything ran out of memory or trials tested the
fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from sp_bench.analysis import identifiers, words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.limits import Limit
from sp_bench.analysis.settings import Setting
from sp_bench.config.workload import TRAINING
from sp_bench.formats import MISSING, whole

# Options that change memory and may be missing in titles
UNTITLED = (identifiers.KERNEL, "workload.model_code", "hardware.allocator")


def tries(limit: Limit) -> str:
    """How often the longest that fits and the shortest that does not were tried: `1 and 2`."""
    return " and ".join(map(str, limit.tried))


NOT_REACHED = "not reached"  # no longer sequence was tried with a known result


def ends(limit: Limit) -> tuple[str, str]:
    """(what fits, what does not) as text: 374,784 and 387,072; or `at least 249,856` and `not reached`."""
    ran, failed = (cell and cell.asked["seq_len"] for cell in (limit.largest_ok, limit.smallest_oom))
    fits = f"at least {whole(ran)}" if limit.is_open else whole(ran)
    if failed is None:
        return fits, NOT_REACHED if limit.is_open else MISSING
    fails = f"{whole(failed)} ({limit.exhausted_memory})" if limit.exhausted_memory else whole(failed)
    return fits, f"{NOT_REACHED}, but {fails} did not fit" if limit.is_open else fails


def is_fit_only(limit: Limit) -> bool:
    """Whether the longest that fits ran no complete step."""
    return limit.largest_ok is not None and not limit.largest_ok.ok


@dataclass(frozen=True)
class Longest:
    setting: Setting  # only of the cells at the ends of brackets
    limits: tuple[Limit, ...]
    names: tuple[str, ...]  # method, kernel, number of ranks and distinguishing options of each limit
    short_names: tuple[str, ...]  # the same without `columns`
    columns: tuple[str, ...]  # options in which the limits differ, and for which a table has columns

    @property
    def title(self) -> str:
        return self.setting.title


def longest(settings: Sequence[Setting]) -> Longest | None:
    """All limits of the settings; None if nothing ran out of memory and no trial tested the fit."""
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
    shared += tuple(_in_words(ends[0], [path for path in moving if path not in differing], shared))
    setting = Setting(shared, cells, {}, like.fabrics, like.smallest)
    names = tuple(_name(setting_of, limit, shown, differing) for setting_of, limit in found)
    columns = words.step_columns(ends)
    named = [path for path in differing if path not in columns]
    short = tuple(_name(setting_of, limit, shown, named, columns) for setting_of, limit in found)
    return Longest(setting, tuple(limit for _, limit in found), names, short, tuple(columns))


def _name(
    setting: Setting, limit: Limit, shown: Sequence[Setting], differing: Sequence[str], left_out: Sequence[str] = ()
) -> str:
    """A limit's name. left_out: options that are shown elsewhere."""
    cell = limit.cells[0]
    elsewhere = {words.option(path, cell.options.get(path)) for path in left_out}
    parts = [part for part in setting.apart(shown) if part not in elsewhere]
    parts += _in_words(cell, differing, parts)
    name = f"{words.method(cell, but=identifiers.OF_LIMITS)}, {words.processors(cell)}"
    return f"{name}: {', '.join(parts)}" if parts else name


def _in_words(cell: Cell, paths: Sequence[str], beside: Sequence[str]) -> list[str]:
    """The options in words, without those that `beside` has already."""
    found = []
    for path in paths:
        value = cell.options.get(path)
        if value not in (None, False) and (text := words.option(path, value)) not in beside:
            found.append(text)
    return found
