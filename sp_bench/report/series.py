"""Which cells may share a figure (a setting) and which a line of it (a series), and what both are called.

A figure never mixes models, shapes, dtypes, data-parallel sizes, fabrics, devices or isolations; a line never mixes
kernels or options of a method. Whatever else two cells differ in becomes part of a name only where the names would be
equal.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

OWN_CODE = "sp_bench"  # the implementation of our own methods
EXCHANGE = "collective"  # the workload without attention: neither heads, mask nor seq_len
_SETTING = [
    *("workload", "pass_kind", "model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "causal", "dtype"),
    *("batch_size", "dp_replicate_size", "dp_shard_size", "fabric", "hardware", "device_memory_gib", "isolation"),
]
_OPTIONS = ("kernel", "implementation", "dkv_dtype", "head_stride", "head_chunks", "ulysses_degree")
# How a cell is measured, not what it is.
_PROTOCOL = ("warmup_steps", "timed_steps", "correctness_seq_len", "seed", "attribution")


def name_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Add `setting` (one string a figure), `over_fabrics` (the setting without its fabric) and `series` (one string a
    line, the same on every fabric); `cells` holds one row of each cell."""
    leaves = pd.DataFrame([config_leaves(config) for config in cells["config"]], index=cells.index)
    whole = cells.join(leaves[[c for c in leaves if c not in cells]])
    # Of the config, only what the columns do not already say: model.hidden_size, workload.optimizer, fabric.env.X ...
    extra = [c for c in whole.columns if "." in c and c.rpartition(".")[2] not in {*cells.columns, "name"}]
    extra = [c for c in extra if c.rpartition(".")[2] not in _PROTOCOL]
    of_setting = [c for c in extra if not c.startswith(("method.", "kernel.", "hardware.device"))]
    of_series = [*_OPTIONS, *(c for c in extra if c.startswith(("method.", "kernel.")))]
    whole["setting"] = _settings(whole, of_setting, fabric=True)
    whole["over_fabrics"] = _settings(whole, [c for c in of_setting if not c.startswith("fabric.")], fabric=False)
    whole["series"] = _base_series(whole)
    _separate(whole, ["over_fabrics", "sp_size"], of_series)
    protocol = sorted((c for c in whole.columns if c.rpartition(".")[2] in _PROTOCOL), key=lambda c: "." not in c)
    _separate(whole, ["setting", "sp_size", "seq_len"], [*protocol, "cell_id"])
    whole["device"] = whole.get("hardware.device")
    return whole


def config_leaves(config: Any) -> dict[str, Any]:
    """The config's values by dotted name; nothing for a row without a readable config."""
    try:
        tree = json.loads(config)
    except (TypeError, ValueError):
        return {}
    flat: dict[str, Any] = {}
    stack = [("", tree)] if isinstance(tree, dict) else []
    while stack:
        prefix, branch = stack.pop()
        for key, value in branch.items():
            if isinstance(value, dict):
                stack.append((f"{prefix}{key}.", value))
            else:
                flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def _settings(cells: pd.DataFrame, extra: Sequence[str], *, fabric: bool) -> list[str]:
    asked = (dict(zip(_SETTING, row, strict=True)) for row in cells[_SETTING].itertuples(index=False))
    names = [_setting_words(row, fabric=fabric) for row in asked]
    for column in extra:
        mixed = _mixed(cells.assign(name=names), ["name"], column)
        pairs = zip(names, cells[column], strict=True)
        names = [f"{name}; {column}={_text(value)}" if name in mixed else name for name, value in pairs]
    return names


def _setting_words(row: Mapping[str, Any], *, fabric: bool) -> str:
    known = {name: _text(row[name]) for name in _SETTING}
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
    if (known["dp_replicate_size"], known["dp_shard_size"]) not in (("1", "1"), ("?", "?")):
        words.append(f"dp {known['dp_replicate_size']} x {known['dp_shard_size']} (replicate x shard)")
    words += [known["fabric"], known["hardware"]] if fabric else [known["hardware"]]
    if known["device_memory_gib"] != "?":
        words.append(f"capped at {known['device_memory_gib']} GiB a device")
    if known["isolation"] == "group":
        words.append("warm process group")
    return f"{words[0]}: {', '.join(words[1:])}"


def _base_series(cells: pd.DataFrame) -> list[str]:
    """method, layout, placement, and whose code it is unless it is ours. A layout says nothing where no KV travels
    around a ring: it is left out there. The exchange alone is named by its primitive."""
    rings = (cells["ring_degree"].fillna(2) > 1) | (cells["layout"].fillna("contiguous") != "contiguous")
    with_ring = set(cells["method"][rings])
    names = []
    asked = cells[["method", "layout", "placement", "implementation"]]
    asked = asked.assign(method=cells["method"].mask(cells["workload"] == EXCHANGE, cells["primitive"]))
    for method, layout, placement, code in asked.itertuples(index=False):
        whose = None if pd.isna(code) or code == OWN_CODE else f"({code})"
        parts = [_text(method), layout if method in with_ring else None, placement, whose]
        names.append(" ".join(str(part) for part in parts if not pd.isna(part)))
    return names


def _separate(cells: pd.DataFrame, within: list[str], columns: Sequence[str]) -> None:
    """Append a column's value to the series that it tells apart, column by column until nothing is left to tell."""
    for column in columns:
        mixed = _mixed(cells, [*within, "series"], column)
        name = column.rpartition(".")[2]
        cells["series"] = [
            f"{series} {name}={_text(value)}" if series in mixed else series
            for series, value in zip(cells["series"], cells[column], strict=True)
        ]


def _mixed(cells: pd.DataFrame, names: list[str], column: str) -> set[str]:
    """The last of `names`, wherever cells that are equal in `names` differ in `column`; a missing value is one too."""
    values = cells.drop_duplicates([*names, column])
    return set(values.loc[values.duplicated(names), names[-1]])


def _text(value: Any) -> str:
    if pd.isna(value):
        return "?"
    return f"{value:g}" if isinstance(value, float) else str(value)
