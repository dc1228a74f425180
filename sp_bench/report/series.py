"""Which cells may share a figure (a setting) and which a line of it (a series), and what both are called.

A figure never mixes models, shapes, dtypes, data-parallel sizes, numbers of micro-batches, fabrics, devices, memory
caps, isolations, ways of launching a step, engines, what they recompute and tile, places of the optimizer or pools of
rows (environments); a line never mixes kernels, implementations or options of a method. A name always says copy
engines, and the kernel wherever our methods ran with several; whatever else two cells differ in becomes part of it only
where names would be equal.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sp_bench.config.dotted import dotted
from sp_bench.config.trial import EngineConfig
from sp_bench.costs.message_sizes import transport_name
from sp_bench.report.formats import whole

OWN_CODE = "sp_bench"  # the implementation of our own methods
REPLAYED = "replayed as a CUDA graph"
EXCHANGE = "collective"  # the workload without attention: neither heads, mask nor seq_len
_SETTING = (
    *("workload", "pass_kind", "model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "causal", "dtype"),
    *("batch_size", "micro_batches", "engine", "activation_checkpointing", "loss_tile_tokens", "dp_replicate_size"),
    *("dp_shard_size", "fabric", "hardware", "device_memory_gib", "optimizer_offload", "isolation", "launch"),
)
_TRAINING = ("engine", "activation_checkpointing", "loss_tile_tokens")  # said wherever a model takes steps
_CODE = ("kernel", "implementation")  # no line mixes them, on whatever number of ranks
_OPTIONS = (*_CODE, "dkv_dtype", "head_stride", "head_chunks", "ulysses_degree")
# What a method does without the option: beside another value, its name is the plain one.
_UNSAID = {"head_chunks": 1, "head_stride": "all"}
_TRANSPORT = "method.exchange"
# How a cell is measured, not what it is.
_PROTOCOL = ("warmup_steps", "timed_steps", "correctness_seq_len", "seed", "attribution")

Key = TypeVar("Key", bound=Hashable)
Values = Mapping[str, Any]  # column or dotted name of an option -> its value, None where it is not known


@dataclass(frozen=True)
class Name:
    """What a cell is called among others."""

    setting: str  # one string a figure
    values: Values  # what the setting was made from
    over_fabrics: str  # the setting without its fabric
    series: str  # one string a line, the same on every fabric
    series_but_kernel: str

    @property
    def says_kernel(self) -> bool:
        return self.series != self.series_but_kernel


def name_cells(cells: Sequence[Values]) -> list[Name]:
    """The names of cells that are shown together. Each is the columns of one row of it, with its `pool`."""
    leaves = [config_leaves(cell["config"]) for cell in cells]
    columns = {name for cell in cells for name in cell}
    # Of the config, only what the columns do not already say: model.hidden_size, workload.optimizer, fabric.env.X ...
    dotted_names = dict.fromkeys(name for each in leaves for name in each if "." in name)
    extra = [name for name in dotted_names if _last(name) not in {*columns, "name", *_PROTOCOL}]
    protocol = [*(name for name in dotted_names if _last(name) in _PROTOCOL), *_PROTOCOL]
    of_method = [name for name in extra if name.startswith(("method.", "kernel.")) and name != _TRANSPORT]
    of_setting = [name for name in extra if not name.startswith(("method.", "kernel.", "hardware.device"))]
    asked = [_asked(cell, each) for cell, each in zip(cells, leaves, strict=True)]
    over_fabrics = [words for words, _ in _settings(asked, [n for n in of_setting if not _is_fabric(n)], fabric=False)]
    series = _Series(asked, over_fabrics)
    series.say_kernels()
    # Over both transports at once, so that of two cells that differ in their options too each says its own.
    series.separate(over_fabrics, _CODE)
    sizes = [cell["sp_size"] for cell in asked]
    series.separate(list(zip(over_fabrics, sizes, strict=True)), [*_OPTIONS, *of_method])
    series.say_transport()
    settings = _settings(asked, of_setting, fabric=True)
    places = [(words, cell["sp_size"], cell["seq_len"]) for (words, _), cell in zip(settings, asked, strict=True)]
    series.separate(places, [_TRANSPORT, *protocol, "cell_id"])
    return [
        Name(words, values, over, series.name(i), series.name(i, leave_out="kernel"))
        for i, ((words, values), over) in enumerate(zip(settings, over_fabrics, strict=True))
    ]


def shared_values(cells: Sequence[Values]) -> Values:
    """The options of which all have one value."""
    first, *others = cells
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}


def option_words(name: str, value: Any) -> str:
    """micro_batches=8; an environment variable of a fabric goes by its own name."""
    shown = name.removeprefix("fabric.env.")
    return f"{shown} not set" if value is None else f"{shown}={_text(value)}"


def library(implementation: str | None) -> tuple[str, str] | None:
    """Name and version of a library whose code a row ran, as its column `implementation` has them: name==version.

    The version is empty where it was not known. None: the code is ours, or nobody's."""
    if implementation in (None, OWN_CODE):
        return None
    name, _, version = implementation.partition("==")
    return name, version


def config_leaves(config: Any) -> dict[str, Any]:
    """The config's values by dotted name; nothing for a row without a readable config."""
    try:
        tree = json.loads(config)
        return dotted(tree) if isinstance(tree, dict) else {}
    except (TypeError, ValueError, RecursionError):  # the last of a config that is nested deeper than Python calls
        return {}


def asked_for(config: Any) -> str:
    """The config as text, without options that say what goes without saying: rows of before there were such an option
    lack it. Empty for a row without a readable config."""
    leaves = config_leaves(config).items()
    said = {name: v for name, v in leaves if v is not None and v != _UNSAID.get(name.removeprefix("method."))}
    return json.dumps(said, sort_keys=True) if said else ""


def _asked(cell: Values, leaves: Values) -> dict[str, Any]:
    """What one row says was asked for: its columns, and of its config what they do not say."""
    own = cell["implementation"] in (None, OWN_CODE)
    return {
        **dict.fromkeys((*_SETTING, *_PROTOCOL)),
        **leaves,
        **cell,
        # old rows lack these columns: their config may say them
        "engine": leaves.get("engine.name") or leaves.get("engine") or cell["engine"] or EngineConfig().name,
        "optimizer_offload": leaves.get("engine.optimizer_offload") or cell["optimizer_offload"],
        "micro_batches": cell["micro_batches"] or 1,
        "activation_checkpointing": leaves.get("workload.activation_checkpointing"),
        "loss_tile_tokens": leaves.get("workload.loss_tile_tokens"),
        "dkv_dtype": cell["dkv_dtype"] if own else None,  # no option of a library's, and old rows do not say it
        **{name: unsaid if cell[name] is None else cell[name] for name, unsaid in _UNSAID.items()},
    }


def _settings(cells: Sequence[Values], extra: Sequence[str], *, fabric: bool) -> list[tuple[str, Values]]:
    """Of each cell the words of its setting, and the values that they were made from."""
    names = [_setting_words(cell, fabric=fabric) for cell in cells]
    values = [{name: cell[name] for name in _SETTING} for cell in cells]
    for column in (*extra, "pool"):
        said = _mixed(names, [cell.get(column) for cell in cells])
        for i, cell in enumerate(cells):
            if names[i] in said:
                values[i][column] = cell.get(column)
        names = [
            f"{name}; {cell['pool'] if column == 'pool' else option_words(column, cell.get(column))}"
            if name in said
            else name
            for name, cell in zip(names, cells, strict=True)
        ]
    return list(zip(names, values, strict=True))


def _setting_words(cell: Values, *, fabric: bool) -> str:
    known = {name: _text(cell[name]) for name in _SETTING}
    words = []
    if cell["model"] is not None:
        words.append(known["model"])
    if cell["num_layers"] is not None:
        words.append(f"{known['num_layers']} layers")
    if cell["workload"] == EXCHANGE:  # no attention
        words.append(known["dtype"])
    else:
        words.append(f"{known['num_heads']}/{known['num_kv_heads']} heads of {known['head_dim']}")
        words.append({True: "causal", False: "not causal", None: "mask unknown"}[cell["causal"]])
        words += [known["dtype"], f"batch {known['batch_size']}"]
    if cell["micro_batches"] != 1:
        words.append(f"{known['micro_batches']} micro-batches a step")
    if cell["workload"] in ("train_step", "parity"):
        words.append(f"engine {known['engine']}")
        if cell["activation_checkpointing"] == "full":
            words.append("full activation checkpointing")
        if cell["loss_tile_tokens"] is not None:
            words.append(f"logits of {whole(cell['loss_tile_tokens'])} tokens at a time")
    if (cell["dp_replicate_size"], cell["dp_shard_size"]) not in ((1, 1), (None, None)):
        words.append(f"dp {known['dp_replicate_size']} x {known['dp_shard_size']} (replicate x shard)")
    words += [known["fabric"], known["hardware"]] if fabric else [known["hardware"]]
    if cell["device_memory_gib"] is not None:
        words.append(f"capped at {known['device_memory_gib']} GiB a device")
    if cell["optimizer_offload"] is not None:
        words.append(f"optimizer offloaded ({known['optimizer_offload']})")
    if cell["isolation"] == "group":
        words.append("warm process group")
    if cell["launch"] == "cuda_graph":
        words.append(REPLAYED)
    what = known["workload"] if cell["pass_kind"] == "step" else f"{known['workload']} {known['pass_kind']}"
    return f"{what}: {', '.join(words)}"


class _Series:
    """The series of some cells while they are being named: of each the words that it says so far, and of what."""

    def __init__(self, cells: Sequence[Values], over_fabrics: Sequence[str]) -> None:
        """At first method, variant, layout, placement, and whose code it is unless it is ours. A layout says nothing
        where no KV travels around a ring: it is left out there. The exchange alone is named by its primitive."""
        self.cells, self.over_fabrics = cells, over_fabrics
        with_ring = {
            cell["method"]
            for cell in cells
            if cell["ring_degree"] is None or cell["ring_degree"] > 1 or cell["layout"] not in (None, "contiguous")
        }
        self.said: list[list[tuple[str, str]]] = []
        for cell in cells:
            method = cell["method"]
            if cell["workload"] == EXCHANGE:
                method = transport_name(cell["primitive"], cell["exchange"])
            layout = cell["layout"] if method in with_ring else None
            whose = library(cell["implementation"])
            code = whose and f"({' '.join(filter(None, whose))})"
            parts = (_text(method), cell["variant"], layout, cell["placement"], code)
            self.said.append([("method", " ".join(str(part) for part in parts if part is not None))])

    def name(self, i: int, leave_out: str = "") -> str:
        return " ".join(words for option, words in self.said[i] if option != leave_out)

    def say_kernels(self) -> None:
        """The kernel in our names if one setting has several kernels of ours; libraries choose their own."""
        own = [c["implementation"] in (None, OWN_CODE) and c["kernel"] is not None for c in self.cells]
        kernels: dict[str, set[str]] = {}
        for cell, setting, is_own in zip(self.cells, self.over_fabrics, own, strict=True):
            if is_own:
                kernels.setdefault(setting, set()).add(cell["kernel"])
        if any(len(each) > 1 for each in kernels.values()):
            for cell, said, is_own in zip(self.cells, self.said, own, strict=True):
                said += [("kernel", cell["kernel"])] if is_own else []

    def say_transport(self) -> None:
        """Copy engines after method and layout, before the options; the primitive of an exchange names them itself."""
        for cell, said in zip(self.cells, self.said, strict=True):
            if cell.get(_TRANSPORT) == "copy_engines" and cell["workload"] != EXCHANGE:
                said.insert(1, (_TRANSPORT, "by copy engines"))

    def separate(self, within: Sequence[Hashable], columns: Sequence[str]) -> None:
        """Append the value of each column where it tells cells apart that are equal in `within` and in their names."""
        for column in columns:
            option = _last(column)
            names = [self.name(i) for i in range(len(self.cells))]
            mixed = _mixed(list(zip(within, names, strict=True)), [cell.get(column) for cell in self.cells])
            ambiguous = {name for _, name in mixed}
            for cell, said, name in zip(self.cells, self.said, names, strict=True):
                value = cell.get(column)
                goes_without_saying = option in _UNSAID and value == _UNSAID[option]
                if name in ambiguous and not goes_without_saying:
                    is_kernel = option == "kernel" and value is not None
                    said.append((option, str(value) if is_kernel else f"{option}={_text(value)}"))


def _last(name: str) -> str:
    """The option of a dotted name: micro_batches of workload.micro_batches."""
    return name.rpartition(".")[2]


def _is_fabric(name: str) -> bool:
    return name.startswith("fabric.")


def _mixed(keys: Sequence[Key], values: Sequence[Any]) -> set[Key]:
    """The keys that have several values; a missing one is a value too."""
    found: dict[Key, set[Any]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, set()).add(value)
    return {key for key, each in found.items() if len(each) > 1}


def _text(value: Any) -> str:
    if value is None:
        return "?"
    return f"{value:g}" if isinstance(value, float) else str(value)
