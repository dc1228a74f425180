"""Names of methods, options, places, cells and settings, made here and nowhere else: words for pages, figures and
papers; identifiers for the appendix and the CSV. The words of an option and of its values stand at its declaration, in
config/.

Cells of one setting may share a figure, and cells of one series a line of it. A figure never mixes models, shapes,
dtypes, data-parallel sizes, numbers of micro-batches, fabrics, devices, memory caps, isolations, ways of launching a
step, engines, recomputation, tiling, places of the optimizer or pools of rows (environments). A line never mixes
kernels, implementations or options of a method. An identifier always has copy engines, and the kernel if our methods
ran with several. Other differences become part of it only if identifiers would be equal.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from sp_bench.config.machine import NO_DELAY
from sp_bench.config.options import BY_PATH, OPTIONS
from sp_bench.config.workload import TRAINING
from sp_bench.costs.flags import OF_DEVICES
from sp_bench.costs.message_sizes import transport_name
from sp_bench.formats import counted, whole
from sp_bench.rows.names import Values, group_of, library, mixed, option_values, pack_seed, short_name, tell_apart

if TYPE_CHECKING:
    from sp_bench.analysis.cells import Cell

WITH_ARTICLE = ("ring", "double_ring", "all_gather")  # methods whose name is a noun of the field: the zigzag ring
EXCHANGE = "collective"  # the workload without attention: neither heads, mask nor seq_len
PACKING = "workload.packing"
DRAWN = (PACKING, "workload.document_len", "workload.document_sigma")  # the options in the words of `drawn`
LENGTHS = (*DRAWN[1:], "workload.document_lens")  # the parameters of a distribution
SINGLE_STEP = "workload.single_step"
LAYERS_RUN = "layers_run"  # in rows of a step that is a line over two depths (over_depth.py): the layers that ran
OF_LIMITS = ("workload.fit", SINGLE_STEP)  # ways to request a step that do not change its memory
MASKED = "workload.masked_label_share"
LAUNCH, MICRO_BATCHES, _RECOMPUTED = "workload.launch", "workload.micro_batches", "workload.activation_checkpointing"
_ENGINE, _TRANSPORT, _INNER_RING = "engine.name", "method.exchange", "method.inner_ring_degree"

# The order in names and tables. Other options follow in the order of their declarations.
_ORDER = (
    *("method.head_chunks", "method.head_stages", _INNER_RING, "method.head_stride", _TRANSPORT, _RECOMPUTED),
    *("workload.linear_dtype", "workload.model_code", "workload.loss_tile_tokens", "workload.mlp_tile_tokens"),
    *("workload.checkpoint_offload", "engine.reshard_after_forward", "engine.reduce_gradients"),
    "engine.optimizer_offload",
)
_ORDERED = sorted(OPTIONS, key=lambda option: _ORDER.index(option.path) if option.path in _ORDER else len(_ORDER))
_OF_METHOD = tuple(option.path for option in _ORDERED if option.named and option.group == "method")
# Options of a training step besides its engine -> the default, which names leave out
OF_STEP = {option.path: option.none_means for option in _ORDERED if option.named and option.group != "method"}
# Options -> the head of their column, in tables whose lines differ in them
STEP_COLUMNS = {option.path: option.head for option in _ORDERED if option.head}

# Options that a setting's identifier always has if they are set. It has others only to distinguish settings.
_OF_SHAPE = (
    *("workload.name", "workload.pass_kind", "model.name", "model.num_layers", "model.num_heads", "model.num_kv_heads"),
    *("model.head_dim", "workload.causal", "dtype", "batch_size"),
)
OF_VALUES = ("model.attention", "model.v_head_dim", "model.kv_lora_rank")  # beside the heads, where a model has them
_OF_TRAINING = (MICRO_BATCHES, _ENGINE, _RECOMPUTED, *OF_STEP)
_DATA_PARALLEL = ("dp_replicate_size", "dp_shard_size")
_OF_DEVICES = ("hardware.device_memory_gib", "hardware.ranks_per_gpu", "engine.optimizer_offload")
_OF_MACHINE = (*_OF_DEVICES, "isolation", LAUNCH)
_OF_WORLD = ("fabric.name", "hardware.name", "num_nodes", "world", "link.name")
_ALWAYS = (*_OF_SHAPE, *OF_VALUES, *_OF_TRAINING, *_DATA_PARALLEL, *_OF_WORLD, *_OF_MACHINE)
_OF_PLACES = ("seq_len", "sp_size")  # a setting's cells may differ in them
_OF_SERIES = ("method", "kernel")  # groups of options that belong to series
_CODE = ("kernel.name", "implementation")  # no line mixes them, on any number of ranks

# Options of measuring are in no setting, and in a series only if identifiers would be equal.
PROTOCOL = tuple(option.path for option in OPTIONS if option.protocol)
# Their order in identifiers: a single step comes first, since its warm-up does not matter
_TELLING = (SINGLE_STEP, *(path for path in PROTOCOL if path != SINGLE_STEP))

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


# -- identifiers --


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
    return _filled(declared, value) if declared else option_identifier(path, value)


def one_rank(values: Values) -> str:
    """The part of names that marks a world of one real rank; empty if all ranks are real."""
    name = link(values)
    if not name:
        return ""
    messages = "messages that take no time" if name == NO_DELAY else f"messages modelled as {name}"
    return f"one real rank of all, {messages}"


def link(values: Values) -> str:
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
        parts += [f"{num_heads}/{num_kv_heads} heads of {head_dim}", *_unusual(cell, OF_VALUES, setting_identifier)]
        parts += [mask, _text(dtype), f"batch {_text(batch_size)}"]
    parts += _unusual(cell, _OF_TRAINING, setting_identifier)
    data = tuple(cell[path] for path in _DATA_PARALLEL)
    if data not in ((1, 1), (None, None)):
        parts.append(f"dp {_text(data[0])} x {_text(data[1])} (replicate x shard)")
    parts += [_text(cell["fabric.name"]) if fabric else "", _text(cell["hardware.name"])]
    parts += _unusual(cell, ("num_nodes",), setting_identifier)
    parts.append(one_rank(cell))
    parts += _unusual(cell, _OF_MACHINE, setting_identifier)
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
        own = [cell["kernel.name"] if library(cell["implementation"]) is None else None for cell in self.cells]
        known = [(setting, kernel) for setting, kernel in zip(self.over_fabrics, own, strict=True) if kernel]
        if mixed([setting for setting, _ in known], [kernel for _, kernel in known]):
            for parts, kernel in zip(self.parts, own, strict=True):
                parts += [] if kernel is None else [("kernel.name", kernel)]

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
                    is_kernel = path == "kernel.name" and value is not None
                    parts.append((path, str(value) if is_kernel else f"{short_name(path)}={_text(value)}"))


def _unusual(values: Values, paths: Sequence[str], write: Callable[[str, Any], str]) -> list[str]:
    """The text that `write` makes of each option that is not at its default. Engines have no default."""
    known = [(path, values.get(path)) for path in paths]
    return [
        write(path, value)
        for path, value in known
        if value is not None and (value != BY_PATH[path].none_means or path == _ENGINE)
    ]


def _filled(declared: str | Mapping[Any, str], value: Any) -> str:
    """The declared words of a value, or the value itself."""
    text = declared if isinstance(declared, str) else declared.get(value, declared.get("", "{}"))
    return text.format(value)


def _text(value: Any) -> str:
    if value is None:
        return "?"
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- words for readers --


def _in_words(path: str, value: Any) -> str:
    """`4 chunks`, or name=value if no words are declared."""
    declared = _declared(path)
    return _filled(declared, value) if declared and value is not None else option_identifier(path, value)


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


def unusual(cell: "Cell", path: str) -> str:
    """An option of a cell in words; empty if it is at its default."""
    return "".join(_unusual(cell.options, [path], _in_words))


def in_column(path: str, value: Any) -> str:
    """An option's text in its column of STEP_COLUMNS; empty if it is not set."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return whole(value)
    return _filled(BY_PATH[path].under_head or "{}", value)


def step_columns(cells: "Sequence[Cell]") -> list[str]:
    """The options of STEP_COLUMNS in which training steps differ."""
    steps = [cell for cell in cells if cell.asked["workload"] in TRAINING]
    return [path for path in STEP_COLUMNS if len({str(cell.options.get(path)) for cell in steps}) > 1]


def kernel(cell: "Cell") -> str:
    name = cell.asked["kernel"]
    return "" if name is None else _in_words("kernel.name", name)


def fabric(name: Any) -> str:
    return _in_words("fabric.name", str(name))


def method(cell: "Cell", but: Sequence[str] = ()) -> str:
    """`Ulysses, 4 chunks, copy engines`; `zigzag ring`; `zigzag double ring, 4x2`, whose inner rings have 4 ranks. It
    is unique within a place and kernel. but: options that are left out."""
    return ", ".join(_method_parts(cell, but))


def the_method(cell: "Cell") -> str:
    """The method within a sentence: `the zigzag ring`, `Ulysses (4 chunks)`."""
    name, *options = _method_parts(cell)
    name = f"the {name}" if cell.asked["method"] in WITH_ARTICLE else name
    return f"{name} ({', '.join(options)})" if options else name


def plain_method(cell: "Cell") -> str:
    """The method without layout and options."""
    return ", ".join(filter(None, [_in_words("method.name", cell.asked["method"]), _variant(cell)]))


def _variant(cell: "Cell") -> str:
    """The variant of a library's method: which of its communication patterns."""
    variant = cell.asked["variant"]
    return _in_words("method.variant", variant) if variant else ""


def _method_parts(cell: "Cell", but: Sequence[str] = ()) -> list[str]:
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
            is_split = path == _INNER_RING and value and asked["sp_size"]  # any row may lack its size, or have 0
            parts.append(_rings(value, asked["sp_size"]) if is_split else _in_words(path, value))
    placed = ("method.name", "kernel.name", *_OF_METHOD, *(() if cell.name.pack is None else ("seed",)), *but)
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


def processors(cell: "Cell") -> str:
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


def place(cell: "Cell") -> str:
    """`131,072 tokens on 4 GPUs`, with the pack if a setting has several."""
    return ", ".join(filter(None, [size(cell), pack(cell)]))


def size(cell: "Cell") -> str:
    """131,072 tokens on 4 GPUs."""
    length = cell.asked["seq_len"]
    return f"{whole(length)} tokens on {processors(cell)}" if length else f"on {processors(cell)}"


def pack(cell: "Cell") -> str:
    """`pack of seed 3`; empty if its setting has no other pack of the same distribution."""
    return "" if cell.name.pack is None else f"pack of seed {cell.name.pack}"


def workload(cell: "Cell") -> str:
    """Attention, forward and backward."""
    asked = cell.asked
    parts = (_in_words("workload.name", asked["workload"]), _in_words("workload.pass_kind", asked["pass_kind"]))
    return ", ".join(filter(None, parts))


def model(cell: "Cell") -> str:
    return _in_words("model.name", cell.asked["model"])


def heads(cell: "Cell") -> str:
    """`32/8 heads of 128`; `16/16 heads of 192, values of 128, latents of 512`."""
    asked = cell.asked
    of_all = f"{asked['num_heads']}/{asked['num_kv_heads']} heads of {asked['head_dim']}"
    return ", ".join([of_all, *_unusual(cell.options, OF_VALUES, _in_words)])


def dtype(cell: "Cell") -> str:
    return _in_words("dtype", cell.asked["dtype"])


def hardware(cell: "Cell") -> str:
    return str(cell.asked["hardware"] or "").upper()


def is_packed(cell: "Cell") -> bool:
    return cell.asked["packing"] not in (None, "none")


def packed(cell: "Cell") -> str:
    """`packed documents: lognormal, median 4,096, sigma 1`; empty without packing."""
    return f"packed documents: {drawn(cell)}" if is_packed(cell) else ""


def distribution(cell: "Cell") -> str:
    """`lognormal, median 4,096, sigma 1: 24 documents, the longest has 21,968 tokens`, with the seed if a setting has
    several packs."""
    which = ", ".join(filter(None, [drawn(cell), pack(cell)]))
    known = next((row for row in cell.rows if row["num_documents"] is not None), None)
    if known is None or not is_packed(cell):
        return which
    total, longest = counted(known["num_documents"], "document"), whole(known["longest_document"])
    return f"{which}: {total}, the longest has {longest} tokens"


def drawn(cell: "Cell") -> str:
    """lognormal, median 4,096, sigma 1."""
    if not is_packed(cell):
        return "one document"
    length, sigma, _ = (cell.options.get(path) for path in LENGTHS)
    known = {"fixed": f"all of {whole(length)} tokens", "file": "a given list"}.get(str(cell.asked["packing"]))
    return known or f"{cell.asked['packing']}, median {whole(length)}, sigma {sigma or 0:g}"


def setting(cell: "Cell") -> tuple[str, ...]:
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
    parts += _unusual(values, (_ENGINE, MICRO_BATCHES, _RECOMPUTED, *OF_STEP), _in_words)
    parts.append(one_rank(values))
    parts += _unusual(values, _OF_DEVICES, _in_words)
    data = tuple(asked[path] for path in _DATA_PARALLEL)
    parts.append(f"data parallel {data[0]} x {data[1]}" if data not in ((1, 1), (None, None)) else "")
    parts.append(packed(cell))
    parts += _unusual(cell.options, (MASKED, LAUNCH), _in_words)
    parts.append(hardware(cell))
    return tuple(filter(None, parts))
