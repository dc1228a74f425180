"""Words for readers: how pages, figures and papers name methods, options, places and settings, made here and nowhere
else. The words of an option and of its values stand at its declaration, in config/; identifiers.py has identifiers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.identifiers import (
    DATA_PARALLEL,
    ENGINE,
    INNER_RING,
    KERNEL,
    LAUNCH,
    MICRO_BATCHES,
    OF_MEMORY,
    OF_STEP,
    OF_VALUES,
    ORDERED,
    RECOMPUTED,
    filled,
    not_default,
    one_rank,
    option_identifier,
)
from sp_bench.config.options import BY_PATH
from sp_bench.config.workload import TRAINING
from sp_bench.costs.flags import OF_DEVICES
from sp_bench.formats import counted, whole

WITH_ARTICLE = ("ring", "double_ring", "all_gather")  # methods whose name is a noun of the field: the zigzag ring
PACKING = "workload.packing"
DRAWN = (PACKING, "workload.document_len", "workload.document_sigma")  # the options in the words of `drawn`
LENGTHS = (*DRAWN[1:], "workload.document_lens")  # the parameters of a distribution
LAYERS_RUN = "layers_run"  # in rows of a step that is a line over two depths (over_depth.py): the layers that ran
MASKED = "workload.masked_label_share"
_OF_METHOD = tuple(option.path for option in ORDERED if option.named and option.group == "method")
# Options -> the head of their column, in tables whose lines differ in them
STEP_COLUMNS = {option.path: option.head for option in ORDERED if option.head}

FLAGS = {
    "short_window": "timed for less than 0.2 s",
    "clock_mismatch": "clocks that disagree by over 2%",
    "window_disagrees": "step times that the window does not bear out within 2%",
    "unsettled": "steps that grew or shrank by over 3%",
    "transient": "single steps over 5% off their neighbours, or a trend",
    "bimodal": "steps in a fast and a slow group",
    "host_bound": "steps that wait for the host",
    **OF_DEVICES,
    "loss_not_falling": "a loss that does not fall",
    "kernel_uncounted": "calls of the attention kernel that nobody counted",
    "mean_of_means": "means over micro-batches and data-parallel ranks that are averaged, whatever labels they have",
    "full_depth_unproven": "steps of all layers that are not shown to be right",
    "foreign_load": "other load on the machine",
    "unequal_nodes": "hosts that are not equal",
    "allocator_retried": "an allocator at the brink",
    "above_device_memory": "more memory in use than the emulated device has",
    "leftover_memory": "a peak that has leftovers of other work in it",
    "single_step": "one step alone, counted while it was timed",
    "fit": "attention's arithmetic left out",
    "shared_gpu": "ranks that share a GPU",
    "lower_bound": "one real rank of uneven ones, whose time is a lower bound",
}


def _declared(path: str) -> str | Mapping[Any, str]:
    """The declared words of an option's values; empty without any, such as for a method from outside."""
    return BY_PATH[path].words if path in BY_PATH else ""


METHODS = cast(Mapping[str, str], _declared("method.name"))


def _in_words(path: str, value: Any) -> str:
    """`4 chunks`, or name=value if no words are declared."""
    declared = _declared(path)
    return filled(declared, value) if declared and value is not None else option_identifier(path, value)


def option(path: str, value: Any) -> str:
    """An option that distinguishes settings or steps: `warm processes`, `loss_tile_tokens=2048`, `allocator not
    set`."""
    declared = _declared(path)
    if path == "model.name":
        return option_identifier(path, value)  # the setting's heads and layers are equal, so only the name differs
    if isinstance(declared, Mapping) and [*declared.values()].count(declared.get(value, "")) > 1:
        return option_identifier(path, value)  # other values have the same words
    return _in_words(path, value)


def of_step(path: str, value: Any) -> str:
    """An option of a training step in words; empty if it is not set."""
    return "" if value is None else option(path, value)


def unusual(cell: Cell, path: str) -> str:
    """An option of a cell in words; empty if it is at its default."""
    return "".join(not_default(cell.options, [path], _in_words))


def policy(cell: Cell) -> str:
    """`static groups, first fit`; empty without a policy."""
    return ", ".join(filter(None, (unusual(cell, f"workload.{each}") for each in ("policy", "filling"))))


def in_column(path: str, value: Any) -> str:
    """An option's text in its column of STEP_COLUMNS; empty if it is not set."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return whole(value)
    return filled(BY_PATH[path].under_head or "{}", value)


def step_columns(cells: Sequence[Cell]) -> list[str]:
    """The options of STEP_COLUMNS in which training steps differ."""
    steps = [cell for cell in cells if cell.asked["workload"] in TRAINING]
    return [path for path in STEP_COLUMNS if len({str(cell.options.get(path)) for cell in steps}) > 1]


def kernel(cell: Cell) -> str:
    name = cell.asked["kernel"]
    return "" if name is None else _in_words(KERNEL, name)


def fabric(name: Any) -> str:
    return _in_words("fabric.name", str(name))


def link(cell: Cell) -> str:
    """What carries the messages of one real rank: NVLink on one host, or what joins several."""
    declared = cast(Mapping[str, str], _declared("link.name"))
    return "NVLink" if cell.link in declared and hosts(cell) == 1 else declared.get(cell.link, cell.link)


def hosts(cell: Cell) -> int:
    return cell.asked["num_nodes"] or 1


def method(cell: Cell, but: Sequence[str] = ()) -> str:
    """`Ulysses, 4 chunks, copy engines`; `zigzag ring`; `zigzag double ring, 4x2`, whose inner rings have 4 ranks. It
    is unique within a place and kernel. but: options that are left out."""
    return ", ".join(_method_parts(cell, but))


def bound(cell: Cell) -> str:
    """What stands behind the name of a cell whose time is a lower bound."""
    return ", lower bound" if cell.is_lower_bound else ""


def the_method(cell: Cell) -> str:
    """The method within a sentence: `the zigzag ring`, `Ulysses (4 chunks)`."""
    name, *options = _method_parts(cell)
    name = f"the {name}" if cell.asked["method"] in WITH_ARTICLE else name
    return f"{name} ({', '.join(options)})" if options else name


def plain_method(cell: Cell) -> str:
    """The method without layout and options."""
    return ", ".join(filter(None, [_in_words("method.name", cell.asked["method"]), _variant(cell)]))


def _variant(cell: Cell) -> str:
    """The variant of a library's method: which of its communication patterns."""
    variant = cell.asked["variant"]
    return _in_words("method.variant", variant) if variant else ""


def _method_parts(cell: Cell, but: Sequence[str] = ()) -> list[str]:
    asked, layout = cell.asked, cell.asked["layout"]
    if asked["method"] == "single" and asked["workload"] == "attention":
        return [f"{kernel(cell)} alone"]
    name = _in_words("method.name", asked["method"])
    if not (asked["method"] in WITH_ARTICLE or layout not in (None, "contiguous")):
        layout = ""
    parts = (
        [name, _variant(cell), layout] if cell.is_library else [f"{layout} {name}" if layout else name, _variant(cell)]
    )
    for path in _OF_METHOD:
        value = cell.options.get(path)
        if value is not None and value != BY_PATH[path].none_means:
            is_split = path == INNER_RING and value and asked["sp_size"]  # any row may lack its size, or have 0
            parts.append(_rings(value, asked["sp_size"]) if is_split else _in_words(path, value))
    placed = ("method.name", KERNEL, *_OF_METHOD, *(() if cell.name.pack is None else ("seed",)), *but)
    for path, value in cell.name.series_values.items():
        if value is not None and path not in placed:
            parts.append(str(value) if path == "implementation" else _in_words(path, value))
    return list(filter(None, parts))


def _rings(inner: int, sp_size: int) -> str:
    """`4x2`: 2 inner rings of 4 ranks."""
    outer = sp_size // inner
    return f"{inner}x{outer}{'' if min(inner, outer) > 1 else ' is one ring'}"


def listed_words(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1] if words else ""]))


def processors(cell: Cell) -> str:
    """`4 GPUs`, `2 CPU ranks`, `one real rank of 8`: the ranks of a sequence, and all ranks if there are more."""
    asked = cell.asked
    size, world = asked["sp_size"], asked["world_size"] or asked["sp_size"]
    if not cell.all_ranks_were_there:
        layers = asked.get(LAYERS_RUN)
        by = f", by the line through {layers[0]} and {layers[1]} layers" if layers else ""
        return f"one real rank of {whole(world)}{by}"
    noun = "GPU" if cell.processor == "GPU" else "CPU rank"
    share = f"{whole(size)} {noun}{'' if size == 1 else 's'}"
    return share if world == size else f"{share} of {whole(world)}"


def place(cell: Cell) -> str:
    """`131,072 tokens on 4 GPUs`, with the pack if a setting has several."""
    return ", ".join(filter(None, [size(cell), pack(cell)]))


def size(cell: Cell) -> str:
    """131,072 tokens on 4 GPUs."""
    length = cell.asked["seq_len"]
    return f"{whole(length)} tokens on {processors(cell)}" if length else f"on {processors(cell)}"


def pack(cell: Cell) -> str:
    """`pack of seed 3`; empty if its setting has no other pack of the same distribution."""
    return "" if cell.name.pack is None else f"pack of seed {cell.name.pack}"


def workload(cell: Cell) -> str:
    """Attention, forward and backward."""
    asked = cell.asked
    parts = (_in_words("workload.name", asked["workload"]), _in_words("workload.pass_kind", asked["pass_kind"]))
    return ", ".join(filter(None, parts))


def model(cell: Cell) -> str:
    return _in_words("model.name", cell.asked["model"])


def heads(cell: Cell) -> str:
    """`32/8 heads of 128`; `16/16 heads of 192, values of 128, latents of 512`."""
    asked = cell.asked
    of_all = f"{asked['num_heads']}/{asked['num_kv_heads']} heads of {asked['head_dim']}"
    return ", ".join([of_all, *not_default(cell.options, OF_VALUES, _in_words)])


def dtype(cell: Cell) -> str:
    return _in_words("dtype", cell.asked["dtype"])


def hardware(cell: Cell) -> str:
    return str(cell.asked["hardware"] or "").upper()


def is_packed(cell: Cell) -> bool:
    return cell.asked["packing"] not in (None, "none")


def packed(cell: Cell) -> str:
    """`packed documents: lognormal, median 4,096, sigma 1`; empty without packing."""
    return f"packed documents: {drawn(cell)}" if is_packed(cell) else ""


def distribution(cell: Cell) -> str:
    """`lognormal, median 4,096, sigma 1: 24 documents, the longest has 21,968 tokens`, with the seed if a setting has
    several packs."""
    which = ", ".join(filter(None, [drawn(cell), pack(cell)]))
    known = next((row for row in cell.rows if row["num_documents"] is not None), None)
    if known is None or not is_packed(cell):
        return which
    total, longest = counted(known["num_documents"], "document"), whole(known["longest_document"])
    return f"{which}: {total}, the longest has {longest} tokens"


def drawn(cell: Cell) -> str:
    """lognormal, median 4,096, sigma 1."""
    if not is_packed(cell):
        return "one document"
    length, sigma, _ = (cell.options.get(path) for path in LENGTHS)
    known = {"fixed": f"all of {whole(length)} tokens", "file": "a given list"}.get(str(cell.asked["packing"]))
    return known or f"{cell.asked['packing']}, median {whole(length)}, sigma {sigma or 0:g}"


def setting(cell: Cell) -> tuple[str, ...]:
    """The options that all cells of a setting share, without the fabric, one text each."""
    asked, values = cell.asked, cell.name.values
    parts = [workload(cell)]
    if asked["workload"] in TRAINING:
        parts[0] += f" of {model(cell)}"
        parts.append(f"{asked['num_layers']} layers" if asked["model"] not in _declared("model.name") else "")
    if asked["num_heads"] is not None:
        parts.append(heads(cell))
    parts += ["" if asked["causal"] in (True, None) else "not causal", dtype(cell)]
    parts.append(f"batch {asked['batch_size']}" if asked["batch_size"] not in (None, 1) else "")
    parts += not_default(values, (ENGINE, MICRO_BATCHES, RECOMPUTED, *OF_STEP), _in_words)
    parts.append(one_rank(values))
    parts += not_default(values, OF_MEMORY, _in_words)
    data = tuple(asked[path] for path in DATA_PARALLEL)
    parts.append(f"data parallel {data[0]} x {data[1]}" if data not in ((1, 1), (None, None)) else "")
    parts.append(packed(cell))
    parts += not_default(cell.options, (MASKED, LAUNCH), _in_words)
    parts.append(hardware(cell))
    return tuple(filter(None, parts))
