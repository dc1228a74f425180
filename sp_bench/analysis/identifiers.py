"""Identifiers of cells, settings and series: for the appendix and the CSV. words.py has the words for pages and papers.

Cells of one setting may share a figure, and cells of one series a line of it. A figure never mixes models, shapes,
dtypes, data-parallel sizes, numbers of micro-batches, fabrics, devices, memory caps, isolations, ways of launching a
step, engines, recomputation, tiling, places of the optimizer or pools of rows (environments). A line never mixes
kernels, implementations or options of a method. An identifier always has copy engines, and the kernel if our methods
ran with several. Other differences become part of it only if identifiers would be equal.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sp_bench.config.machine import NO_DELAY
from sp_bench.config.options import BY_PATH, OPTIONS
from sp_bench.costs.message_sizes import transport_name
from sp_bench.rows.names import Values, group_of, library, mixed, option_values, pack_seed, short_name, tell_apart

EXCHANGE = "collective"  # the workload without attention: neither heads, mask nor seq_len
SINGLE_STEP = "workload.single_step"
OF_LIMITS = ("workload.fit", SINGLE_STEP)  # ways to request a step that do not change its memory
LAUNCH, MICRO_BATCHES, RECOMPUTED = "workload.launch", "workload.micro_batches", "workload.activation_checkpointing"
ENGINE, KERNEL, INNER_RING, _TRANSPORT = "engine.name", "kernel.name", "method.inner_ring_degree", "method.exchange"
CHECKPOINT_OFFLOAD, OPTIMIZER_OFFLOAD = "workload.checkpoint_offload", "engine.optimizer_offload"
SAVED = (RECOMPUTED, CHECKPOINT_OFFLOAD, OPTIMIZER_OFFLOAD)  # ways to save memory: equal where stacks are compared

# The order in names and tables. Other options follow in the order of their declarations.
_ORDER = (
    *("method.head_chunks", "method.head_stages", INNER_RING, "method.head_stride", _TRANSPORT, RECOMPUTED),
    *("workload.linear_dtype", "workload.model_code", "workload.loss_tile_tokens", "workload.mlp_tile_tokens"),
    *(CHECKPOINT_OFFLOAD, "engine.reshard_after_forward", "engine.reduce_gradients", OPTIMIZER_OFFLOAD),
)
ORDERED = sorted(OPTIONS, key=lambda option: _ORDER.index(option.path) if option.path in _ORDER else len(_ORDER))
# Options of a training step besides its engine -> the default, which names leave out
OF_STEP = {option.path: option.none_means for option in ORDERED if option.named and option.group != "method"}

# Options that a setting's identifier always has if they are set. It has others only to distinguish settings.
_OF_SHAPE = (
    *("workload.name", "workload.pass_kind", "model.name", "model.num_layers", "model.num_heads", "model.num_kv_heads"),
    *("model.head_dim", "workload.causal", "dtype", "batch_size"),
)
OF_VALUES = ("model.attention", "model.v_head_dim", "model.kv_lora_rank")  # beside the heads, where a model has them
_OF_TRAINING = (MICRO_BATCHES, ENGINE, RECOMPUTED, *OF_STEP)
DATA_PARALLEL = ("dp_replicate_size", "dp_shard_size")
OF_MEMORY = ("hardware.device_memory_gib", "hardware.ranks_per_gpu", OPTIMIZER_OFFLOAD)
_OF_MACHINE = (*OF_MEMORY, "isolation", LAUNCH)
_OF_WORLD = ("fabric.name", "hardware.name", "num_nodes", "world", "link.name")
_ALWAYS = (*_OF_SHAPE, *OF_VALUES, *_OF_TRAINING, *DATA_PARALLEL, *_OF_WORLD, *_OF_MACHINE)
_OF_PLACES = ("seq_len", "sp_size")  # a setting's cells may differ in them
_OF_SERIES = ("method", "kernel")  # groups of options that belong to series
_CODE = (KERNEL, "implementation")  # no line mixes them, on any number of ranks

# Options of measuring are in no setting, and in a series only if identifiers would be equal.
PROTOCOL = tuple(option.path for option in OPTIONS if option.protocol)
# Their order in identifiers: a single step comes first, since its warm-up does not matter
_TELLING = (SINGLE_STEP, *(path for path in PROTOCOL if path != SINGLE_STEP))


@dataclass(frozen=True)
class Name:
    """The identifiers of a cell among others."""

    setting: str  # one per figure
    values: Values  # the options in the setting
    over_fabrics: str  # the setting without its fabric
    series: str  # one per line of a figure, the same on every fabric
    series_of_limits: str  # the series, but equal for tests of the fit, single steps and timed steps
    series_values: Values = field(default_factory=dict)  # the options in the series
    pack: int | None = None  # the seed of its documents if the setting has packs of several seeds


def name_cells(rows: Sequence[Values]) -> list[Name]:
    """The names of cells that are shown together. rows: one row per cell, with its `pool`."""
    beside = ("implementation", "primitive", "ring_degree", "cell_id", "pool")
    cells = [option_values(row) | {name: row[name] for name in beside} for row in rows]
    others = dict.fromkeys(name for cell in cells for name in cell if name not in BY_PATH and name not in beside)
    paths = [path for path in (*BY_PATH, *others) if path not in PROTOCOL]
    of_series = [path for path in paths if group_of(path) in _OF_SERIES and path not in ("method.name", _TRANSPORT)]
    of_setting = [path for path in paths if path not in _OF_PLACES and group_of(path) not in _OF_SERIES]
    extra = [path for path in of_setting if path not in _ALWAYS]
    over_fabrics = [name for name, _ in _settings(cells, [p for p in extra if group_of(p) != "fabric"], fabric=False)]
    series = _Series(cells, over_fabrics)
    series.add_kernels()
    # Over both transports at once: cells that differ in options too are distinguished by the options.
    series.separate(over_fabrics, _CODE)
    series.separate([(name, cell["sp_size"]) for name, cell in zip(over_fabrics, cells, strict=True)], of_series)
    series.add_transport()
    settings = _settings(cells, extra, fabric=True)
    seeds = [pack_seed(cell) for cell in cells]
    of_several = mixed(over_fabrics, seeds)
    packs = [seed if name in of_several else None for name, seed in zip(over_fabrics, seeds, strict=True)]
    places = [
        (name, cell["sp_size"], cell["seq_len"], pack)
        for (name, _), cell, pack in zip(settings, cells, packs, strict=True)
    ]
    series.separate(places, [_TRANSPORT, *_TELLING, "cell_id"])
    series.add_packs(packs)
    return [
        Name(name, values, over, series.name(i), series.name(i, but=OF_LIMITS), series.values(i), packs[i])
        for i, ((name, values), over) in enumerate(zip(settings, over_fabrics, strict=True))
    ]


def shared_values(cells: Sequence[Values]) -> Values:
    """The options that have the same value in all cells."""
    first, *others = cells
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}


def option_identifier(path: str, value: Any) -> str:
    """`micro_batches=8`. An environment variable of a fabric has its own name."""
    shown = path.removeprefix("fabric.env.")
    return f"{shown} not set" if value is None else f"{short_name(shown)}={_text(value)}"


def setting_identifier(path: str, value: Any) -> str:
    """An option in a setting's identifier: `8 micro-batches a step`, `loss_tile_tokens=2048`."""
    declared = BY_PATH[path].identifier
    return filled(declared, value) if declared else option_identifier(path, value)


def one_rank(values: Values) -> str:
    """The part of names that marks a world of one real rank; empty if all ranks are real."""
    name = link_of(values)
    if not name:
        return ""
    messages = "messages that take no time" if name == NO_DELAY else f"messages modelled as {name}"
    return f"one real rank of all, {messages}"


def link_of(values: Values) -> str:
    """The link model of one real rank's messages; empty if all ranks are real."""
    return values["link.name"] if values.get("world") == "one_rank" else ""


def _settings(cells: Sequence[Values], extra: Sequence[str], *, fabric: bool) -> list[tuple[str, Values]]:
    """The identifier of each cell's setting, and the options in it."""
    names = [_setting_identifier(cell, fabric=fabric) for cell in cells]
    values = [{path: cell[path] for path in _ALWAYS} for cell in cells]
    for path in (*extra, "pool"):
        several = mixed(names, [cell.get(path) for cell in cells])
        for i, cell in enumerate(cells):
            if names[i] in several:
                values[i][path] = cell.get(path)
                names[i] += f"; {cell['pool'] if path == 'pool' else option_identifier(path, cell.get(path))}"
    return list(zip(names, values, strict=True))


def _setting_identifier(cell: Values, *, fabric: bool) -> str:
    workload, pass_kind, model, *numbers, causal, dtype, batch_size = (cell[path] for path in _OF_SHAPE)
    layers, num_heads, num_kv_heads, head_dim = map(_text, numbers)
    parts = ["" if model is None else model, "" if numbers[0] is None else f"{layers} layers"]
    if workload == EXCHANGE:  # no attention
        parts.append(_text(dtype))
    else:
        mask = {True: "causal", False: "not causal", None: "mask unknown"}[causal]
        parts += [f"{num_heads}/{num_kv_heads} heads of {head_dim}", *not_default(cell, OF_VALUES, setting_identifier)]
        parts += [mask, _text(dtype), f"batch {_text(batch_size)}"]
    parts += not_default(cell, _OF_TRAINING, setting_identifier)
    data = tuple(cell[path] for path in DATA_PARALLEL)
    if data not in ((1, 1), (None, None)):
        parts.append(f"dp {_text(data[0])} x {_text(data[1])} (replicate x shard)")
    parts += [_text(cell["fabric.name"]) if fabric else "", _text(cell["hardware.name"])]
    parts += not_default(cell, ("num_nodes",), setting_identifier)
    parts.append(one_rank(cell))
    parts += not_default(cell, _OF_MACHINE, setting_identifier)
    what = _text(workload) if pass_kind == "step" else f"{_text(workload)} {_text(pass_kind)}"
    return f"{what}: {', '.join(filter(None, parts))}"


class _Series:
    """Builds the series of some cells: the parts of each name so far, and the options in them."""

    def __init__(self, cells: Sequence[Values], over_fabrics: Sequence[str]) -> None:
        """Begin with method, variant, layout, placement and, if it is not ours, the code's library. The layout is left
        out if no KV travels around a ring, since it has no effect then. A bare exchange is named by its primitive."""
        self.cells, self.over_fabrics = cells, over_fabrics
        with_ring = {
            cell["method.name"]
            for cell in cells
            if cell["ring_degree"] is None
            or cell["ring_degree"] > 1
            or cell["method.layout"] not in (None, "contiguous")
        }
        self.parts: list[list[tuple[str, str]]] = []
        for cell in cells:
            method = cell["method.name"]
            if cell["workload.name"] == EXCHANGE:
                method = transport_name(cell["primitive"], cell[_TRANSPORT])
            layout = cell["method.layout"] if method in with_ring else None
            whose = library(cell["implementation"])
            code = whose and f"({' '.join(filter(None, whose))})"
            parts = (_text(method), cell["method.variant"], layout, cell["method.placement"], code)
            self.parts.append([("method.name", " ".join(str(part) for part in parts if part is not None))])

    def name(self, i: int, but: Sequence[str] = ()) -> str:
        return " ".join(part for path, part in self.parts[i] if path not in but)

    def values(self, i: int) -> Values:
        return {path: self.cells[i].get(path) for path, _ in self.parts[i]}

    def add_kernels(self) -> None:
        """Add the kernel to our methods' names if a setting has several. Libraries choose their own kernels."""
        own = [cell[KERNEL] if library(cell["implementation"]) is None else None for cell in self.cells]
        known = [(setting, kernel) for setting, kernel in zip(self.over_fabrics, own, strict=True) if kernel]
        if mixed([setting for setting, _ in known], [kernel for _, kernel in known]):
            for parts, kernel in zip(self.parts, own, strict=True):
                parts += [] if kernel is None else [(KERNEL, kernel)]

    def add_transport(self) -> None:
        """Add copy engines after method and layout, before the options. A bare exchange has them in its primitive."""
        for cell, parts in zip(self.cells, self.parts, strict=True):
            if cell[_TRANSPORT] == "copy_engines" and cell["workload.name"] != EXCHANGE:
                parts.insert(1, (_TRANSPORT, "by copy engines"))

    def add_packs(self, packs: Sequence[int | None]) -> None:
        """Add the seeds of packs. Cells of the same name without a pack need none: they are in another setting."""
        for parts, seed in zip(self.parts, packs, strict=True):
            parts += [] if seed is None else [("seed", f"seed={seed}")]

    def separate(self, within: Sequence[Hashable], paths: Sequence[str]) -> None:
        """Append an option's value where it distinguishes cells that are equal in `within` and in name.

        The method's default is left out: beside another value, the plain name means the default."""
        names = [self.name(i) for i in range(len(self.cells))]
        for parts, values in zip(self.parts, tell_apart(names, self.cells, paths, within), strict=True):
            for path, value in values:
                usual = BY_PATH[path].none_means if path in BY_PATH else None
                if value is None or value != usual:
                    is_kernel = path == KERNEL and value is not None
                    parts.append((path, str(value) if is_kernel else f"{short_name(path)}={_text(value)}"))


def not_default(values: Values, paths: Sequence[str], write: Callable[[str, Any], str]) -> list[str]:
    """The text that `write` makes of each option that is not at its default. Engines have no default."""
    known = [(path, values.get(path)) for path in paths]
    return [
        write(path, value)
        for path, value in known
        if value is not None and (value != BY_PATH[path].none_means or path == ENGINE)
    ]


def filled(declared: str | Mapping[Any, str], value: Any) -> str:
    """The declared words of a value, or the value itself."""
    text = declared if isinstance(declared, str) else declared.get(value, declared.get("", "{}"))
    return text.format(value)


def _text(value: Any) -> str:
    if value is None:
        return "?"
    return f"{value:g}" if isinstance(value, float) else str(value)
