"""Which cells may share a figure (a setting) and which a line of it (a series), and what both are called.

A figure never mixes models, shapes, dtypes, data-parallel sizes, numbers of micro-batches, fabrics, devices, memory
caps, isolations, ways of launching a step, engines, what they recompute and tile, places of the optimizer or pools of
rows (environments); a line never mixes kernels, implementations or options of a method. A name always says copy
engines, and the kernel wherever our methods ran with several; whatever else two cells differ in becomes part of it only
where names would be equal.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sp_bench.config.dotted import dotted
from sp_bench.config.trial import EngineConfig
from sp_bench.report.formats import whole as whole_number

OWN_CODE = "sp_bench"  # the implementation of our own methods
REPLAYED = "replayed as a CUDA graph"
EXCHANGE = "collective"  # the workload without attention: neither heads, mask nor seq_len
_SETTING = [
    *("workload", "pass_kind", "model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "causal", "dtype"),
    *("batch_size", "micro_batches", "dp_replicate_size", "dp_shard_size", "fabric", "hardware", "device_memory_gib"),
    *("isolation", "optimizer_offload", "launch"),
]
_TRAINING = ("engine", "activation_checkpointing", "loss_tile_tokens")  # said wherever a model takes steps
_OPTIONS = ("kernel", "implementation", "dkv_dtype", "head_stride", "head_chunks", "ulysses_degree")
# What a method does without the option: beside another value, its name is the plain one.
_UNSAID = {"head_chunks": 1, "head_stride": "all"}
_CODE = ("kernel", "implementation")  # of the options, those that no line may mix, on whatever number of ranks
_TRANSPORT = "method.exchange"
_ENGINE = ("engine", "engine.name")  # of the config: what runs the model, where that can be chosen
_OFFLOAD = ("engine.optimizer_offload",)
# How a cell is measured, not what it is.
_PROTOCOL = ("warmup_steps", "timed_steps", "correctness_seq_len", "seed", "attribution")


def name_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Add `setting` (one string a figure), `over_fabrics` (the setting without its fabric) and `series` (one string a
    line, the same on every fabric); `cells` holds one row of each cell and pool."""
    leaves = pd.DataFrame([config_leaves(config) for config in cells["config"]], index=cells.index)
    whole = cells.join(leaves[[c for c in leaves if c not in cells]])
    # Of the config, only what the columns do not already say: model.hidden_size, workload.optimizer, fabric.env.X ...
    extra = [c for c in whole.columns if "." in c and c.rpartition(".")[2] not in {*cells.columns, "name"}]
    extra = [c for c in extra if c.rpartition(".")[2] not in _PROTOCOL]
    of_setting = [c for c in extra if not c.startswith(("method.", "kernel.", "hardware.device"))]
    whole["engine"] = _said(cells, "engine", leaves, _ENGINE).fillna(EngineConfig().name)  # not written anywhere
    whole["optimizer_offload"] = _said(cells, "optimizer_offload", leaves, _OFFLOAD)
    whole["micro_batches"] = whole["micro_batches"].fillna(1)  # rows of before there were several
    for option in _TRAINING[1:]:
        whole[option] = leaves.get(f"workload.{option}")
    of_series = [*_OPTIONS, *(c for c in extra if c.startswith(("method.", "kernel.")) and c != _TRANSPORT)]
    whole["setting"] = _settings(whole, of_setting, fabric=True)
    whole["over_fabrics"] = _settings(whole, [c for c in of_setting if not c.startswith("fabric.")], fabric=False)
    whole["dkv_dtype"] = whole["dkv_dtype"].where(_own(whole))  # no option of a library's, and old rows do not say it
    whole[list(_UNSAID)] = whole[list(_UNSAID)].astype(object).fillna(_UNSAID)
    whole["series"] = base = _base_series(whole)
    _say_kernels(whole)
    # Over both transports at once, so that of two cells that differ in their options too each says its own.
    _separate(whole, ["over_fabrics"], _CODE)
    _separate(whole, ["over_fabrics", "sp_size"], of_series)
    _say_transport(whole, base)
    protocol = sorted((c for c in whole.columns if c.rpartition(".")[2] in _PROTOCOL), key=lambda c: "." not in c)
    transport = [c for c in whole.columns if c == _TRANSPORT]
    _separate(whole, ["setting", "sp_size", "seq_len"], [*transport, *protocol, "cell_id"])
    whole["device"] = whole.get("hardware.device")
    return whole


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


def _said(cells: pd.DataFrame, column: str, leaves: pd.DataFrame, names: Sequence[str]) -> pd.Series:
    """What the config says under one of these names, the last first; else the row's column, which old rows lack."""
    found = pd.Series(cells[column], dtype=object)  # a column of nulls would be one of numbers
    for name in names:
        if name in leaves:
            found = pd.Series(leaves[name]).combine_first(found)
    return found


def _settings(cells: pd.DataFrame, extra: Sequence[str], *, fabric: bool) -> list[str]:
    columns = [*_SETTING, *_TRAINING]
    asked = (dict(zip(columns, row, strict=True)) for row in cells[columns].itertuples(index=False))
    names = [_setting_words(row, fabric=fabric) for row in asked]
    for column in extra:
        mixed = _mixed(cells.assign(name=names), ["name"], column)
        pairs = zip(names, cells[column], strict=True)
        names = [f"{name}; {_given(column, value)}" if name in mixed else name for name, value in pairs]
    mixed = _mixed(cells.assign(name=names), ["name"], "pool")
    return [f"{name}; {pool}" if name in mixed else name for name, pool in zip(names, cells["pool"], strict=True)]


def _setting_words(row: Mapping[str, Any], *, fabric: bool) -> str:
    known = {name: _text(value) for name, value in row.items()}
    words = [known["workload"] if known["pass_kind"] == "step" else f"{known['workload']} {known['pass_kind']}"]
    if known["model"] != "?":
        words.append(known["model"])
    if known["num_layers"] != "?":
        words.append(f"{known['num_layers']} layers")
    if known["workload"] == "collective":  # no attention
        words.append(known["dtype"])
    else:
        words.append(f"{known['num_heads']}/{known['num_kv_heads']} heads of {known['head_dim']}")
        words.append({"True": "causal", "False": "not causal"}.get(known["causal"], "mask unknown"))
        words += [known["dtype"], f"batch {known['batch_size']}"]
    if known["micro_batches"] != "1":
        words.append(f"{known['micro_batches']} micro-batches a step")
    if known["workload"] in ("train_step", "parity"):
        words.append(f"engine {known['engine']}")
        if known["activation_checkpointing"] == "full":
            words.append("full activation checkpointing")
        if known["loss_tile_tokens"] != "?":
            words.append(f"logits of {whole_number(row['loss_tile_tokens'])} tokens at a time")
    if (known["dp_replicate_size"], known["dp_shard_size"]) not in (("1", "1"), ("?", "?")):
        words.append(f"dp {known['dp_replicate_size']} x {known['dp_shard_size']} (replicate x shard)")
    words += [known["fabric"], known["hardware"]] if fabric else [known["hardware"]]
    if known["device_memory_gib"] != "?":
        words.append(f"capped at {known['device_memory_gib']} GiB a device")
    if known["optimizer_offload"] != "?":
        words.append(f"optimizer offloaded ({known['optimizer_offload']})")
    if known["isolation"] == "group":
        words.append("warm process group")
    if known["launch"] == "cuda_graph":
        words.append(REPLAYED)
    return f"{words[0]}: {', '.join(words[1:])}"


def _base_series(cells: pd.DataFrame) -> list[str]:
    """method, variant, layout, placement, and whose code it is unless it is ours. A layout says nothing where no KV
    travels around a ring: it is left out there. The exchange alone is named by its primitive."""
    rings = (cells["ring_degree"].fillna(2) > 1) | (cells["layout"].fillna("contiguous") != "contiguous")
    with_ring = set(cells["method"][rings])
    names = []
    asked = cells[["method", "variant", "layout", "placement", "implementation"]]
    asked = asked.assign(method=cells["method"].mask(cells["workload"] == EXCHANGE, cells["primitive"]))
    for method, variant, layout, placement, code in asked.itertuples(index=False):
        whose = None if pd.isna(code) or code == OWN_CODE else f"({code.replace('==', ' ')})"
        parts = [_text(method), variant, layout if method in with_ring else None, placement, whose]
        names.append(" ".join(str(part) for part in parts if not pd.isna(part)))
    return names


def _own(cells: pd.DataFrame) -> pd.Series:
    return pd.Series(cells["implementation"]).fillna(OWN_CODE) == OWN_CODE


def _say_kernels(cells: pd.DataFrame) -> None:
    """Append the kernel to our names on a page on which one setting has several of ours; libraries choose their own."""
    own = _own(cells) & cells["kernel"].notna()
    kernels: dict[str, set[str]] = {}
    for setting, kernel in zip(cells.loc[own, "over_fabrics"], cells.loc[own, "kernel"], strict=True):
        kernels.setdefault(setting, set()).add(kernel)
    if any(len(each) > 1 for each in kernels.values()):
        cells.loc[own, "series"] += " " + cells.loc[own, "kernel"]


def _say_transport(cells: pd.DataFrame, base: Sequence[str]) -> None:
    """Put copy engines after method and layout, before the options; the primitive of an exchange names them itself."""
    if _TRANSPORT not in cells:
        return
    by_engines = (cells[_TRANSPORT] == "copy_engines") & (cells["workload"] != EXCHANGE)
    cells["series"] = [
        f"{start} by copy engines{series.removeprefix(start)}" if said else series
        for series, start, said in zip(cells["series"], base, by_engines, strict=True)
    ]


def _separate(cells: pd.DataFrame, within: list[str], columns: Sequence[str]) -> None:
    """Append a column's value to the series that it tells apart, column by column until nothing is left to tell."""
    for column in columns:
        mixed = _mixed(cells, [*within, "series"], column)
        name = column.rpartition(".")[2]
        pairs = zip(cells["series"], cells[column], strict=True)
        cells["series"] = [f"{series}{_option(name, value)}" if series in mixed else series for series, value in pairs]


def _given(column: str, value: Any) -> str:
    """What the config says there, in words; a variable goes by its own name."""
    name = column.removeprefix("fabric.env.")
    return f"{name} not set" if pd.isna(value) else f"{name}={_text(value)}"


def _option(name: str, value: Any) -> str:
    if name in _UNSAID and value == _UNSAID[name]:
        return ""
    return f" {value}" if name == "kernel" and not pd.isna(value) else f" {name}={_text(value)}"


def _mixed(cells: pd.DataFrame, names: list[str], column: str) -> set[str]:
    """The last of `names`, wherever cells that are equal in `names` differ in `column`; a missing value is one too."""
    known = pd.DataFrame(cells[[*names, column]])  # these columns alone: pandas walks all others too
    values = known.drop_duplicates()
    return set(values.loc[values.duplicated(names), names[-1]])


def _text(value: Any) -> str:
    if pd.isna(value):
        return "?"
    return f"{value:g}" if isinstance(value, float) else str(value)
