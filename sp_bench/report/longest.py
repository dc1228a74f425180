"""The longest sequence that fits, of each method and each set of options, where anything ran out of memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from sp_bench.report import words
from sp_bench.report.limits import Limit
from sp_bench.report.settings import Setting


@dataclass(frozen=True)
class Longest:
    setting: Setting  # of the ends of the brackets alone
    limits: tuple[Limit, ...]
    names: tuple[str, ...]  # of each limit: method, number of ranks, and what tells its setting from the others

    @property
    def title(self) -> str:
        return self.setting.title


def longest(settings: Sequence[Setting]) -> Longest | None:
    """None: nothing ran out of memory."""
    found = [(setting, limit) for setting in settings if setting.out_of_memory for limit in setting.limits]
    if not found:
        return None
    shown = list({setting.title: setting for setting, _ in found}.values())
    shared = tuple(part for part in shown[0].parts if all(part in other.parts for other in shown))
    cells = tuple(cell for _, limit in found for cell in limit.cells)
    like = shown[0]
    setting = Setting(shared, cells, {}, like.fabrics, like.smallest)
    return Longest(setting, tuple(limit for _, limit in found), tuple(_name(s, limit, shown) for s, limit in found))


def _name(setting: Setting, limit: Limit, shown: Sequence[Setting]) -> str:
    cell, apart = limit.cells[0], setting.apart(shown)
    told = f"{words.method(cell)}, {words.processors(cell)}"
    return f"{told}: {apart}" if apart else told
