"""Which cells may share a figure (a setting) and which a line of it (a series), and what both are called.

A figure never mixes models, shapes, dtypes, data-parallel sizes, numbers of micro-batches, fabrics, devices, memory
caps, isolations, ways of launching a step, engines, what they recompute and tile, places of the optimizer or pools of
rows (environments); a line never mixes kernels, implementations or options of a method. A name always says copy
engines, and the kernel wherever our methods ran with several; whatever else two cells differ in becomes part of it only
where names would be equal.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sp_bench.config.options import BY_PATH, OPTIONS
from sp_bench.config.trial import NO_DELAY
from sp_bench.costs.message_sizes import transport_name
from sp_bench.rows.names import Values, group_of, library, mixed, option_values, pack_seed, short_name, tell_apart

REPLAYED = "replayed as a CUDA graph"
EXCHANGE = "collective"  # the workload without attention: neither heads, mask nor seq_len
_TRANSPORT = "method.exchange"
_CODE = ("kernel.name", "implementation")  # no line mixes them, on whatever number of ranks
# What a training step has beside its engine -> the value of which nobody speaks
OF_STEP = {
    "workload.model_code": "eager",
    "workload.loss_tile_tokens": None,
    "workload.mlp_tile_tokens": None,
    "workload.checkpoint_offload": False,
    "engine.reshard_after_forward": True,
    "engine.reduce_gradients": "each_micro_batch",
    "engine.forward_prefetch": None,
    "engine.backward_prefetch": None,
}
# Options of which a setting always speaks, if they say anything. Of others it has what tells settings apart.
_SAID = (
    *("workload.name", "workload.pass_kind", "model.name", "model.num_layers", "model.num_heads", "model.num_kv_heads"),
    *("model.head_dim", "workload.causal", "dtype", "batch_size", "workload.micro_batches", "engine.name"),
    *("workload.activation_checkpointing", "dp_replicate_size", "dp_shard_size", *OF_STEP),
    *(
        "fabric.name",
        "hardware.name",
        "hardware.device_memory_gib",
        "hardware.ranks_per_gpu",
        "engine.optimizer_offload",
        "isolation",
    ),
    *("workload.launch", "num_nodes", "world", "link.name"),
)
_OF_PLACES = ("seq_len", "sp_size")  # cells of one setting differ in them
_OF_SERIES = ("method", "kernel")  # groups of options of which a series speaks

# How a cell is measured is neither in a setting nor, unless names would be equal, in a series.
PROTOCOL = tuple(option.path for option in OPTIONS if option.protocol)
SINGLE_STEP = "workload.single_step"
OF_LIMITS = ("workload.fit", SINGLE_STEP)  # ways to ask for a step that move no edge of memory
# In which order cells are told apart by it: a single step is one, whatever its warm-up
_TELLING = (SINGLE_STEP, *(path for path in PROTOCOL if path != SINGLE_STEP))


@dataclass(frozen=True)
class Name:
    """What a cell is called among others."""

    setting: str  # one string a figure
    values: Values  # what the setting was made from
    over_fabrics: str  # the setting without its fabric
    series: str  # one string a line, the same on every fabric
    series_of_limits: str  # the same for what only asks whether a step fits, for a single step and for timed ones
    told: Values = field(default_factory=dict)  # the options that a series says, with their values
    pack: int | None = None  # the seed of its documents, where cells of its setting have packs of several seeds


def name_cells(rows: Sequence[Values]) -> list[Name]:
    """The names of cells that are shown together. Of each cell one row, with its `pool`."""
    beside = ("implementation", "primitive", "ring_degree", "cell_id", "pool")
    cells = [option_values(row) | {name: row[name] for name in beside} for row in rows]
    others = dict.fromkeys(name for cell in cells for name in cell if name not in BY_PATH and name not in beside)
    paths = [path for path in (*BY_PATH, *others) if path not in PROTOCOL]
    of_series = [path for path in paths if group_of(path) in _OF_SERIES and path not in ("method.name", _TRANSPORT)]
    of_setting = [path for path in paths if path not in _OF_PLACES and group_of(path) not in _OF_SERIES]
    extra = [path for path in of_setting if path not in _SAID]
    over_fabrics = [words for words, _ in _settings(cells, [p for p in extra if group_of(p) != "fabric"], fabric=False)]
    series = _Series(cells, over_fabrics)
    series.say_kernels()
    # Over both transports at once, so that of two cells that differ in their options too each says its own.
    series.separate(over_fabrics, _CODE)
    series.separate([(words, cell["sp_size"]) for words, cell in zip(over_fabrics, cells, strict=True)], of_series)
    series.say_transport()
    settings = _settings(cells, extra, fabric=True)
    seeds = [pack_seed(cell) for cell in cells]
    of_several = mixed(over_fabrics, seeds)
    packs = [seed if words in of_several else None for words, seed in zip(over_fabrics, seeds, strict=True)]
    places = [
        (words, cell["sp_size"], cell["seq_len"], pack)
        for (words, _), cell, pack in zip(settings, cells, packs, strict=True)
    ]
    series.separate(places, [_TRANSPORT, *_TELLING, "cell_id"])
    series.say_packs(packs)
    return [
        Name(words, values, over, series.name(i), series.name(i, but=OF_LIMITS), series.told(i), packs[i])
        for i, ((words, values), over) in enumerate(zip(settings, over_fabrics, strict=True))
    ]


def shared_values(cells: Sequence[Values]) -> Values:
    """The options of which all have one value."""
    first, *others = cells
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}


def option_words(path: str, value: Any) -> str:
    """micro_batches=8; an environment variable of a fabric goes by its own name."""
    shown = path.removeprefix("fabric.env.")
    return f"{shown} not set" if value is None else f"{short_name(shown)}={_text(value)}"


def one_rank_words(link: str) -> str:
    """What every name of a world of one rank says."""
    messages = "messages that take no time" if link == NO_DELAY else f"messages modelled as {link}"
    return f"one real rank of all, {messages}"


def _settings(cells: Sequence[Values], extra: Sequence[str], *, fabric: bool) -> list[tuple[str, Values]]:
    """Of each cell the words of its setting, and the values that they were made from."""
    names = [_setting_words(cell, fabric=fabric) for cell in cells]
    values = [{path: cell[path] for path in _SAID} for cell in cells]
    for path in (*extra, "pool"):
        several = mixed(names, [cell.get(path) for cell in cells])
        for i, cell in enumerate(cells):
            if names[i] in several:
                values[i][path] = cell.get(path)
                names[i] += f"; {cell['pool'] if path == 'pool' else option_words(path, cell.get(path))}"
    return list(zip(names, values, strict=True))


def _setting_words(cell: Values, *, fabric: bool) -> str:
    known = {path: _text(cell[path]) for path in _SAID}
    words = []
    if cell["model.name"] is not None:
        words.append(known["model.name"])
    if cell["model.num_layers"] is not None:
        words.append(f"{known['model.num_layers']} layers")
    if cell["workload.name"] == EXCHANGE:  # no attention
        words.append(known["dtype"])
    else:
        words.append(f"{known['model.num_heads']}/{known['model.num_kv_heads']} heads of {known['model.head_dim']}")
        words.append({True: "causal", False: "not causal", None: "mask unknown"}[cell["workload.causal"]])
        words += [known["dtype"], f"batch {known['batch_size']}"]
    if cell["workload.micro_batches"] not in (None, 1):
        words.append(f"{known['workload.micro_batches']} micro-batches a step")
    if cell["engine.name"] is not None:
        words.append(f"engine {known['engine.name']}")
    if cell["workload.activation_checkpointing"] not in (None, "none"):
        words.append(f"{known['workload.activation_checkpointing']} activation checkpointing")
    words += [option_words(path, cell[path]) for path, usual in OF_STEP.items() if cell[path] not in (None, usual)]
    if (cell["dp_replicate_size"], cell["dp_shard_size"]) not in ((1, 1), (None, None)):
        words.append(f"dp {known['dp_replicate_size']} x {known['dp_shard_size']} (replicate x shard)")
    words += [known["fabric.name"], known["hardware.name"]] if fabric else [known["hardware.name"]]
    if cell["num_nodes"] not in (None, 1):
        words.append(f"over {known['num_nodes']} nodes")
    if cell["world"] == "one_rank":
        words.append(one_rank_words(cell["link.name"]))
    if cell["hardware.device_memory_gib"] is not None:
        words.append(f"capped at {known['hardware.device_memory_gib']} GiB a device")
    if cell["hardware.ranks_per_gpu"] not in (None, 1):
        words.append(f"{known['hardware.ranks_per_gpu']} ranks share a GPU")
    if cell["engine.optimizer_offload"] is not None:
        words.append(f"optimizer offloaded ({known['engine.optimizer_offload']})")
    if cell["isolation"] == "group":
        words.append("warm process group")
    if cell["workload.launch"] == "cuda_graph":
        words.append(REPLAYED)
    workload, pass_kind = known["workload.name"], known["workload.pass_kind"]
    return f"{workload if pass_kind == 'step' else f'{workload} {pass_kind}'}: {', '.join(words)}"


class _Series:
    """The series of some cells while they are being named: of each the words that it says so far, and of what."""

    def __init__(self, cells: Sequence[Values], over_fabrics: Sequence[str]) -> None:
        """At first method, variant, layout, placement, and whose code it is unless it is ours. A layout says nothing
        where no KV travels around a ring: it is left out there. The exchange alone is named by its primitive."""
        self.cells, self.over_fabrics = cells, over_fabrics
        with_ring = {
            cell["method.name"]
            for cell in cells
            if cell["ring_degree"] is None
            or cell["ring_degree"] > 1
            or cell["method.layout"] not in (None, "contiguous")
        }
        self.said: list[list[tuple[str, str]]] = []
        for cell in cells:
            method = cell["method.name"]
            if cell["workload.name"] == EXCHANGE:
                method = transport_name(cell["primitive"], cell[_TRANSPORT])
            layout = cell["method.layout"] if method in with_ring else None
            whose = library(cell["implementation"])
            code = whose and f"({' '.join(filter(None, whose))})"
            parts = (_text(method), cell["method.variant"], layout, cell["method.placement"], code)
            self.said.append([("method.name", " ".join(str(part) for part in parts if part is not None))])

    def name(self, i: int, but: Sequence[str] = ()) -> str:
        return " ".join(words for path, words in self.said[i] if path not in but)

    def told(self, i: int) -> dict[str, Any]:
        return {path: self.cells[i].get(path) for path, _ in self.said[i]}

    def say_kernels(self) -> None:
        """The kernel in our names if one setting has several kernels of ours; libraries choose their own."""
        own = [cell["kernel.name"] if library(cell["implementation"]) is None else None for cell in self.cells]
        kernels: dict[str, set[str]] = {}
        for setting, kernel in zip(self.over_fabrics, own, strict=True):
            if kernel is not None:
                kernels.setdefault(setting, set()).add(kernel)
        if any(len(each) > 1 for each in kernels.values()):
            for said, kernel in zip(self.said, own, strict=True):
                said += [] if kernel is None else [("kernel.name", kernel)]

    def say_transport(self) -> None:
        """Copy engines after method and layout, before the options; the exchange alone has them in its primitive."""
        for cell, said in zip(self.cells, self.said, strict=True):
            if cell[_TRANSPORT] == "copy_engines" and cell["workload.name"] != EXCHANGE:
                said.insert(1, (_TRANSPORT, "by copy engines"))

    def say_packs(self, packs: Sequence[int | None]) -> None:
        """The seeds of those that have one. Others of the same name need none: they stand elsewhere."""
        for said, seed in zip(self.said, packs, strict=True):
            said += [] if seed is None else [("seed", f"seed={seed}")]

    def separate(self, within: Sequence[Hashable], paths: Sequence[str]) -> None:
        """Append the value of each option where it tells cells apart that are equal in `within` and in their names.

        What a method does without the option is not said: beside another value, its name is the plain one."""
        names = [self.name(i) for i in range(len(self.cells))]
        for said, told in zip(self.said, tell_apart(names, self.cells, paths, within), strict=True):
            for path, value in told:
                usual = BY_PATH[path].none_means if path in BY_PATH else None
                if value is None or value != usual:
                    is_kernel = path == "kernel.name" and value is not None
                    said.append((path, str(value) if is_kernel else f"{short_name(path)}={_text(value)}"))


def _text(value: Any) -> str:
    if value is None:
        return "?"
    return f"{value:g}" if isinstance(value, float) else str(value)
