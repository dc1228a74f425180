"""The longest sequence that fits, of each method and each set of options, where anything ran out of memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from sp_bench.report import words
from sp_bench.report.limits import Limit
from sp_bench.report.settings import Setting

# What moves the edge of memory and may be missing in titles, which leave out what comes along with another option, such
# as an engine. They always tell of an offloaded optimizer.
OF_MEMORY = (
    "workload.activation_checkpointing",
    "workload.model_code",
    "workload.loss_tile_tokens",
    "workload.mlp_tile_tokens",
    "workload.checkpoint_offload",
    "hardware.allocator",
)


@dataclass(frozen=True)
class Longest:
    setting: Setting  # of the ends of the brackets alone
    limits: tuple[Limit, ...]
    names: tuple[str, ...]  # of each limit: method, kernel, number of ranks, and what tells it from the others

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
    ends = [limit.cells[0] for _, limit in found]
    differing = [
        path for path in ("kernel.name", *OF_MEMORY) if len({str(cell.options.get(path)) for cell in ends}) > 1
    ]
    names = tuple(_name(setting, limit, shown, differing) for setting, limit in found)
    return Longest(setting, tuple(limit for _, limit in found), names)


def _name(setting: Setting, limit: Limit, shown: Sequence[Setting], differing: Sequence[str]) -> str:
    cell = limit.cells[0]
    parts = [part for part in setting.parts if not all(part in other.parts for other in shown)]
    for path in differing:
        value = cell.options.get(path)
        said = words.kernel(cell) if path == "kernel.name" else words.of_step(path, value)
        if value not in (None, False) and not {said, words.option(path, value)} & {*parts}:
            parts.append(said)
    told = f"{words.method(cell)}, {words.processors(cell)}"
    return f"{told}: {', '.join(parts)}" if parts else told
