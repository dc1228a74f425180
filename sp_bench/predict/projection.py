"""Step times that were not measured, from those that were: a few rates fitted to the rows, and the methods' schedules.

A step of attention is its computing and what the method's schedule leaves exposed of its messages (overlap.py); the
time of a message is its bytes over the fabric's measured bandwidth. Computing is linear in three things, whose rates
are fitted over all rows by least squares of relative errors, none below 0:

- FLOPs of the kernel, a rate each kernel;
- elements of q that a method reads and writes beside the kernel, a rate each method: once for each block;
- blocks, which cost a launch each, a time each method.

A training step adds matrix products (FLOPs), pointwise work (elements of the activations) and the update (parameters of
a rank). Matrix products have one rate, the update one for each place of the optimizer, and pointwise work one for each
set of the options SPEED: what runs the layers, what is recomputed and what is offloaded changes how long it takes.

How good that is, is found out by leaving rows out of the fit and predicting them: `held_out`.

P = U * R ranks of one sequence (ulysses x ring), G GPUs of a node.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.fabric_model import PRIMITIVES, bandwidths
from sp_bench.analysis.identifiers import CHECKPOINT_OFFLOAD, KERNEL, OF_STEP, OPTIMIZER_OFFLOAD, RECOMPUTED
from sp_bench.analysis.limits import capacity_gib
from sp_bench.analysis.overlap import exposed_ms
from sp_bench.config.method import MethodConfig
from sp_bench.config.options import BY_PATH
from sp_bench.config.shape import AttentionShape
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory, training
from sp_bench.costs.attention import (
    FLASH_BACKWARD,
    OF_METHODS,
    Traffic,
    add_traffic,
    all_gather_traffic,
    attention_forward_flops,
    ring_traffic,
    ulysses_traffic,
)
from sp_bench.formats import GIB, counted
from sp_bench.hardware import device_bytes, peak_flops
from sp_bench.rows.names import group_of

METHODS = {  # with the primitives that move its tensors
    "single": (),
    "ulysses": ("all_to_all",),
    "ring": ("send_recv",),
    "all_gather": ("all_gather",),
    "usp": ("all_to_all", "send_recv"),
}
BALANCED = {"single": "contiguous", "ulysses": "contiguous"}  # the layout in which all ranks compute as much
LONG = 32_768  # tokens from which errors are stated; shorter steps wait for the host
ROUNDS = 8  # of fitting: what is exposed depends on how long the computing takes
# Training steps that differ in one of these are not equally fast, beside what their FLOPs say
SPEED = (
    *(KERNEL, RECOMPUTED, "workload.model_code", "workload.loss_tile_tokens", "workload.mlp_tile_tokens"),
    *(CHECKPOINT_OFFLOAD, OPTIMIZER_OFFLOAD),
)
StepOptions = tuple[Any, ...]  # the values of SPEED
UPDATE = "update, "  # begins the names of rates of the optimizer
OPTIONS = ("head_chunks", "head_stride")  # rows with these are not our methods as they are by default
UNKNOWN = (
    "window",
    "sinks",
    "layer_kinds",
    "v_head_dim",
    "kv_lora_rank",
    "attention_kind",
)  # nor are these in the model


class NotProjectable(ValueError):
    """What was asked for cannot be predicted from these rows; the message says what is missing."""


class Links(NamedTuple):
    """bytes/s of one GPU by primitive: inside a node, and to other nodes by its network card."""

    inside: Mapping[str, float]
    network: float | None = None  # None: there is one node
    gpus_per_node: int | None = None

    def ms(self, traffic: Traffic, ulysses: int, ring: int) -> dict[tuple[str, str], float]:
        """Time of each message, by phase and op. Ulysses groups are adjacent ranks.

        Raises:
            NotProjectable: a primitive was not measured.
        """
        return {key: 1e3 * float(size) / self._bytes_per_s(key[1], ulysses, ring) for key, size in traffic.items()}

    def _bytes_per_s(self, op: str, ulysses: int, ring: int) -> float:
        if (inside := self.inside.get(PRIMITIVES[op])) is None:
            raise NotProjectable(
                f"no row of workload=collective has the speed of {PRIMITIVES[op]} here; those read have "
                f"{', '.join(sorted(self.inside)) or 'none'}"
            )
        if self.network is None or self.gpus_per_node is None:
            return inside
        node = self.gpus_per_node
        if op == "all_to_all":  # the share for other nodes goes by the network, beside the rest
            if ulysses <= node:
                return inside
            return min(inside * (ulysses - 1) / max(node - 1, 1), self.network * (ulysses - 1) / (ulysses - node))
        if ulysses * ring <= node:
            return inside
        if op == "send":  # the hop to another node is one card's, unless all ranks of a node make it at once
            return min(inside, self.network)
        return min(inside, node * self.network)  # NCCL's rings cross between nodes on every card


@dataclass(frozen=True)
class Work:
    """What one rank has to do in one call of attention, forward and backward."""

    method: str
    kernel: str
    flops: float
    elements: float  # of q, times the blocks
    blocks: float  # calls of the kernel, or a share of one
    asked: Mapping[str, Any]  # what the schedule depends on
    messages_ms: Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Known:
    """A measured cell: what had to be done, and how long it took."""

    cell: Cell
    config: TrialConfig
    work: Work
    ms: float

    @property
    def works(self) -> Mapping[str, Work]:
        """That of each kind of layer: rows of one kind alone are known."""
        return {"full": self.work}


class Basis(NamedTuple):
    """What answers say of a measured cell that they rest on."""

    kernel: str
    seq_len: int
    sp_size: int
    campaigns: tuple[str, ...]


@dataclass(frozen=True)
class Error:
    """Relative errors of predictions of rows that were left out of the fit."""

    what: str
    errors: tuple[float, ...]
    worst: str  # the cell that is predicted worst

    @property
    def median(self) -> float:
        return median(map(abs, self.errors))

    @property
    def largest(self) -> float:
        return max(map(abs, self.errors))

    @property
    def of_most(self) -> float:
        """Nine of ten are within it."""
        return float(np.quantile(np.abs(self.errors), 0.9))


@dataclass(frozen=True)
class Rates:
    """What was fitted: ms for each of the names."""

    attention: Mapping[str, float]
    step: Mapping[str, float]  # empty: no training step was measured

    def know(self, work: Work) -> bool:
        """Whether rows of its kernel and of its method were among those fitted to."""
        return self.attention.keys() >= _amounts(work).keys()

    def know_step(self, config: TrialConfig, work: Work) -> bool:
        """Whether training steps with its options were too."""
        return self.know(work) and self.step.keys() >= _step_amounts(config).keys()

    def attention_ms(self, work: Work) -> float:
        """Forward and backward of one call."""
        computing = self.computing_ms(work)
        return computing + _exposed(work, computing)

    def forward_ms(self, work: Work) -> float:
        computing = self.computing_ms(work) / float(1 + FLASH_BACKWARD)
        messages = {key: ms for key, ms in work.messages_ms.items() if key[0] == "forward"}
        return computing + exposed_ms({**work.asked, "pass_kind": "forward"}, messages, computing)

    def computing_ms(self, work: Work) -> float:
        return sum(self.attention.get(name, 0.0) * amount for name, amount in _amounts(work).items())


@dataclass(frozen=True)
class Fit:
    """Rates, what they were fitted to, and how well they predict rows that they have not seen."""

    rates: Rates
    hardware: str
    fabric: str  # the fastest
    inside: Mapping[str, float]  # its bytes/s by primitive
    memory_gib: float | None  # of a device; None: not known
    ranks: int  # the largest number that was measured
    attention: tuple[Basis, ...]  # what was fitted to
    steps: Mapping[StepOptions, tuple[Basis, ...]]  # the training steps that were fitted to, by their options
    peak_errors: Mapping[StepOptions, tuple[float, ...]]  # relative errors of the memory model on those, where known
    errors: tuple[Error, ...]

    @property
    def kernels(self) -> list[str]:
        return sorted(name.removeprefix("flops ") for name in self.rates.attention if name.startswith("flops "))

    @property
    def fastest_kernel(self) -> str:
        """Of those that training steps were measured with, by its rate in attention; of any without such steps."""
        trained = {str(options[0]) for options in self.steps}
        return min(trained or self.kernels, key=lambda name: self.rates.attention[f"flops {name}"])

    @property
    def methods(self) -> list[str]:
        """Those that have rows, and whose messages were measured on the fastest fabric."""
        sent = {name for name, primitives in METHODS.items() if self.inside.keys() >= set(primitives)}
        return [name for name in METHODS if name in sent and f"blocks {name}" in self.rates.attention]

    def band(self, of_steps: bool, ranks: int, *, one_length: bool = False) -> float:
        """Relative error to reckon with: what nine of ten held-out predictions are within, in the worst case that was
        held out; as much again for each doubling of the measured ranks. one_length: of options whose rows do not show
        how their time grows; the largest held-out error is theirs."""
        errors = [e for e in self.errors if e.what.startswith("training step" if of_steps else "attention")]
        widest = max((e.largest if one_length else e.of_most for e in errors), default=math.inf)
        return widest * (1 + max(0.0, math.log2(ranks / self.ranks)))


def attention_work(
    method: MethodConfig, kernel: str, shape: AttentionShape, degrees: tuple[int, int], links: Links
) -> Work:
    """degrees: (ulysses, ring)."""
    ulysses, ring = degrees
    ranks = ulysses * ring
    if shape.window is not None:
        traffic = OF_METHODS[method.name](method, shape, ranks)
    elif method.name == "all_gather":
        traffic = all_gather_traffic(shape, ring, method.dkv_dtype)
    else:
        exchange = ulysses_traffic(shape, ulysses, ranks)
        traffic = add_traffic(exchange, ring_traffic(shape, ring, ulysses, method.dkv_dtype))
    blocks = ring if method.name in ("ring", "usp") else 1
    if shape.window is not None:
        blocks = min(blocks, 2)  # its own keys, and the border
    asked = {
        "pass_kind": "forward_backward",
        "ring_degree": ring,
        "head_chunks": None,
        "head_stride": None,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "v_head_dim": shape.v_head_dim,
        "causal": shape.causal,
    }
    return Work(
        method.name,
        kernel,
        attention_forward_flops(shape) * float(1 + FLASH_BACKWARD) / ranks,
        shape.batch_size * shape.seq_len / ranks * shape.num_heads * shape.head_dim * blocks,
        blocks,
        asked,
        links.ms(traffic, ulysses, ring) if ranks > 1 else {},
    )


def step_parts(config: TrialConfig, works: Mapping[str, Work], rates: Rates) -> tuple[float, dict[str, float]]:
    """(ms of all its attention, amounts of the rest) of a training step of one rank. works: of layers of each kind."""
    recomputes = config.workload.activation_checkpointing == "full"
    attention = sum(
        number * (rates.attention_ms(works[kind]) + (rates.forward_ms(works[kind]) if recomputes else 0.0))
        for kind, number in config.kinds.items()
    )
    return config.workload.num_micro_batches * attention, _step_amounts(config)


def _step_amounts(config: TrialConfig) -> dict[str, float]:
    model, options = config.model, step_options(config)
    tokens = config.num_sequences * config.seq_len / config.world_size
    width = 8 * model.hidden_size + 4 * model.intermediate_size  # elements that a layer reads or writes a token, about
    place = options[SPEED.index(OPTIMIZER_OFFLOAD)] or "on the device"
    return {
        "matrix products": training.matmul_flops(config, config.seq_len) / config.world_size,
        f"pointwise, {in_words(options)}": tokens * model.num_layers * width,
        f"{UPDATE}{place}": training.num_parameters(model) / config.num_shards,
    }


def step_options(config: TrialConfig) -> StepOptions:
    options = [BY_PATH[path] for path in SPEED]
    return tuple(each.old_rows if (value := each.value(config)) is None else value for each in options)


def with_options(config: TrialConfig, options: StepOptions) -> TrialConfig:
    """`config`, with the values of SPEED that `options` has."""
    for path, value in zip(SPEED, options, strict=True):
        group, _, name = path.partition(".")
        config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    return config


def in_words(options: StepOptions) -> str:
    """cuDNN, all recomputed, compiled, loss_tile_tokens=2048."""
    return ", ".join(filter(None, map(words.of_step, SPEED, options)))


def step_ms(config: TrialConfig, works: Mapping[str, Work], rates: Rates) -> float:
    """ms of a training step; arguments and errors as of `pass_and_update_ms`."""
    return sum(pass_and_update_ms(config, works, rates))


def pass_and_update_ms(config: TrialConfig, works: Mapping[str, Work], rates: Rates) -> tuple[float, float]:
    """ms of a training step's forwards and backwards, and of its update. works: of layers of each kind.

    Raises:
        NotProjectable: no training step with its options was measured, or its products are in FP8.
    """
    if (linear := config.workload.linear_dtype) != "model":
        raise NotProjectable(f"workload.linear_dtype={linear}: no rate of products in FP8 is known; use model")
    if not all(rates.know_step(config, work) for work in works.values()):
        raise NotProjectable(
            f"no training step of fsdp2 with {in_words(step_options(config))} is among the rows; name a campaign that "
            "has some"
        )
    attention, rest = step_parts(config, works, rates)
    ms = {name: rates.step[name] * amount for name, amount in rest.items()}
    update = sum(each for name, each in ms.items() if name.startswith(UPDATE))
    return attention + sum(ms.values()) - update, update


def fit(cells: Sequence[Cell], hardware: str) -> Fit:
    """Fit the rates to all measured cells of our methods on `hardware`, and then without some, to predict those.

    Raises:
        NotProjectable: there are no rows to fit to.
    """
    cells = [cell for cell in cells if cell.all_ranks_were_there]
    speeds = _bandwidths(cells, hardware)
    attention = [k for c in cells if (k := _known(c, hardware, "attention", speeds)) is not None]
    computed = {name for known in attention for name in _amounts(known.work)}
    steps = [k for c in cells if (k := _known(c, hardware, "train_step", speeds)) is not None]
    steps = [k for k in steps if _amounts(k.work).keys() <= computed]  # else its attention would count as nothing
    if not _several_ranks(attention):
        raise NotProjectable(
            f"speeds of hardware={hardware} cannot be predicted: that takes rows of attention, forward and backward, "
            f"on several GPUs, and of workload=collective on as many; {_with_rows(cells, hardware)}"
        )
    ranks = max(k.cell.asked["sp_size"] for k in attention)
    fastest = _fastest(speeds, ranks)
    errors = tuple(_held_out(attention, steps, fastest))
    inside = speeds[fastest, ranks]
    memory_gib = next((gib for known in attention if (gib := capacity_gib(known.cell)) is not None), None)
    rates = _rates(attention, steps)
    rests_on = {options: tuple(_basis(k.cell) for k in found) for options, found in _by_options(steps).items()}
    peaks = {options: _peak_errors(found) for options, found in _by_options(steps).items()}
    of_attention = tuple(_basis(known.cell) for known in attention)
    return Fit(rates, hardware, fastest, inside, memory_gib, ranks, of_attention, rests_on, peaks, errors)


def _basis(cell: Cell) -> Basis:
    campaigns = tuple(sorted({str(row["folder"]) for row in cell.rows}))
    return Basis(cell.asked["kernel"], cell.asked["seq_len"], cell.asked["sp_size"], campaigns)


def _several_ranks(attention: Sequence[Known]) -> bool:
    return any(known.cell.asked["sp_size"] > 1 for known in attention)


def _with_rows(cells: Sequence[Cell], hardware: str) -> str:
    """The way out for a device that has too few rows."""
    devices = sorted({cell.asked["hardware"] for cell in cells})
    enough = []
    for device in devices:
        speeds = _bandwidths(cells, device)
        known = [k for c in cells if (k := _known(c, device, "attention", speeds)) is not None]
        of_gpus = any(capacity_gib(k.cell) is not None for k in known)
        enough += [device] if of_gpus and _several_ranks(known) else []
    return instead(hardware, enough) if enough else "no hardware has them here; name campaigns that have them"


def instead(hardware: str, known: Sequence[str]) -> str:
    """The way out for a device with too few rows: the speeds of a device that has enough, with its own memory."""
    gpu, other = (f"{name.upper()} SXM" for name in (hardware, known[0]))
    memory, peak = device_bytes(gpu), peak_flops(gpu, "bfloat16")
    alike = ", and computes alike by its data sheet" if peak and peak == peak_flops(other, "bfloat16") else ""
    return (
        f"{' and '.join(known)} {'have' if len(known) > 1 else 'has'} them{alike}: --hardware {known[0]} --memory "
        f"{f'{memory / GIB:.1f}' if memory else 'GIB'} says what fits into a GPU with that much memory, with the "
        f"speeds of {known[0]}"
    )


def _peak_errors(steps: Sequence[Known]) -> tuple[float, ...]:
    """Relative errors of the memory model, of each step whose allocator's peak was measured. Single steps are left out:
    the older ones made the optimizer's moments at their end, and no column says which did."""
    return tuple(
        memory.peak_of_row(known.config, known.cell.measured[-1]).bytes / min(known.cell.memory_bytes) - 1
        for known in steps
        if known.cell.memory_column == "max_peak_allocated_bytes" and not known.config.workload.single_step
    )


def _held_out(attention: Sequence[Known], steps: Sequence[Known], fastest: str) -> list[Error]:
    """Without the largest number of ranks, without the longest length, without each fabric but the fastest; and of the
    steps of each set of options, without all but one short step."""
    made = []
    ranks = sorted({k.cell.asked["sp_size"] for k in attention})
    longest = max(k.cell.asked["seq_len"] for k in attention if k.cell.asked["sp_size"] > 1)
    fabrics = sorted({k.cell.asked["fabric"] for k in attention if k.cell.asked["sp_size"] > 1} - {fastest})
    cases: list[tuple[str, Callable[[Known], bool]]] = []
    if len(ranks) > 2:  # a kernel alone, and two numbers of ranks
        cases.append((f"{ranks[-1]} GPUs", lambda k: k.cell.asked["sp_size"] == ranks[-1]))
    cases.append((f"{longest:,} tokens", lambda k: k.cell.asked["seq_len"] >= longest))
    cases += [(f"fabric {name}", lambda k, name=name: k.cell.asked["fabric"] == name) for name in fabrics]
    for what, held in cases:
        kept = [k for k in attention if not held(k)]
        left = [k for k in attention if held(k) and k.cell.asked["seq_len"] >= LONG and k.cell.asked["sp_size"] > 1]
        rates = _rates(kept, []) if kept else Rates({}, {})
        if left := [k for k in left if rates.know(k.work)]:
            made.append(_error(f"attention, {what}", left, [rates.attention_ms(k.work) for k in left]))
    step_cases = [c for c in cases if not c[0].endswith("tokens")]
    if steps:
        longest_step = max(k.cell.asked["seq_len"] for k in steps)
        step_cases.append((f"{longest_step:,} tokens", lambda k: k.cell.asked["seq_len"] >= longest_step))
    for what, held in step_cases:
        kept, of_attention = ([k for k in each if not held(k)] for each in (steps, attention))
        rates = _rates(of_attention, kept) if kept and of_attention else Rates({}, {})
        if left := [k for k in steps if held(k) and rates.know_step(k.config, k.work)]:
            predicted = [step_ms(k.config, k.works, rates) for k in left]
            made.append(_error(f"training step, {what}", left, predicted))
    if from_one := _predicted_from_one(attention, steps):
        left, predicted = zip(*from_one, strict=True)
        made.append(_error("training step, all of its options but the shortest", left, predicted))
    return made


def _predicted_from_one(attention: Sequence[Known], steps: Sequence[Known]) -> list[tuple[Known, float]]:
    """Steps with their predicted ms, where only the shortest step of their options and all of other options were
    fitted to: the evidence that an answer has which rests on one cell. Options with one length have none. Without other
    options there is none either: they are what says how fast matrix products are."""
    found = []
    for options, own in _by_options(steps).items():
        shortest = min(own, key=lambda k: (k.cell.asked["seq_len"], k.cell.asked["sp_size"]))
        if len(own) == len(steps) or not has_several_lengths([_basis(k.cell) for k in own]):
            continue
        rates = _rates(attention, [k for k in steps if k is shortest or step_options(k.config) != options])
        found += [(k, step_ms(k.config, k.works, rates)) for k in own if k is not shortest]
    return found


def has_several_lengths(steps: Sequence[Basis]) -> bool:
    """Whether rows of these options show how their time grows with the length."""
    return len({cell.seq_len for cell in steps}) > 1


def _by_options(steps: Sequence[Known]) -> dict[StepOptions, list[Known]]:
    found: dict[StepOptions, list[Known]] = {}
    for known in steps:
        found.setdefault(step_options(known.config), []).append(known)
    return found


def _error(what: str, left: Sequence[Known], predicted: Sequence[float]) -> Error:
    errors = tuple(ms / known.ms - 1 for ms, known in zip(predicted, left, strict=True))
    worst = left[max(range(len(errors)), key=lambda i: abs(errors[i]))].cell
    asked = worst.asked
    heads = f"{asked['num_heads']}/{asked['num_kv_heads']} heads"
    return Error(
        what,
        errors,
        f"{asked['method']} {asked['kernel']} {asked['fabric']}, {heads}, {asked['seq_len']:,} tokens, "
        f"{counted(asked['sp_size'], 'GPU')}",
    )


def _rates(attention: Sequence[Known], steps: Sequence[Known]) -> Rates:
    names = list(dict.fromkeys(name for known in attention for name in _amounts(known.work)))
    computing = [0.9 * known.ms for known in attention]
    rates = Rates({}, {})
    for _ in range(ROUNDS):
        rows = [[_amounts(known.work).get(name, 0.0) for name in names] for known in attention]
        left = [max(known.ms - _exposed(known.work, ms), 0.0) for known, ms in zip(attention, computing, strict=True)]
        rates = Rates(_least_squares(names, rows, left, [known.ms for known in attention]), {})
        computing = [rates.computing_ms(known.work) for known in attention]
    if not steps:
        return rates
    parts = [step_parts(known.config, known.works, rates) for known in steps]
    of_step = list(dict.fromkeys(name for _, rest in parts for name in rest))
    rows = [[rest.get(name, 0.0) for name in of_step] for _, rest in parts]
    left = [max(known.ms - ms, 0.0) for known, (ms, _) in zip(steps, parts, strict=True)]
    return Rates(rates.attention, _least_squares(of_step, rows, left, [known.ms for known in steps]))


def _least_squares(
    names: Sequence[str], rows: Sequence[Sequence[float]], left: Sequence[float], scale: Sequence[float]
) -> dict[str, float]:
    """The rates, none negative, with the smallest squares of errors relative to `scale`."""
    from scipy.optimize import nnls  # takes longer to import than an answer from fitted rates takes

    matrix, wanted = np.array(rows) / np.array(scale)[:, None], np.array(left) / np.array(scale)
    size = np.maximum(matrix.max(axis=0), 1e-300)  # columns differ by ten orders of magnitude
    found, _ = nnls(matrix / size, wanted)
    return dict(zip(names, map(float, found / size), strict=True))


def _amounts(work: Work) -> dict[str, float]:
    return {
        f"flops {work.kernel}": work.flops,
        f"elements {work.method}": work.elements,
        f"blocks {work.method}": work.blocks,
    }


def _exposed(work: Work, computing_ms: float) -> float:
    return exposed_ms(work.asked, work.messages_ms, computing_ms) if work.messages_ms else 0.0


Speeds = Mapping[tuple[str, int], Mapping[str, float]]  # (fabric, ranks) -> primitive -> bytes/s


def _bandwidths(cells: Sequence[Cell], hardware: str) -> Speeds:
    """The median over environments."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for (_, fabric, device, ranks, primitive), each in bandwidths(cells).items():
        if device == hardware:
            found.setdefault((fabric, ranks), {}).setdefault(primitive, []).append(each.bytes_per_s)
    return {place: {name: median(each) for name, each in speeds.items()} for place, speeds in found.items()}


def _fastest(speeds: Speeds, ranks: int) -> str:
    here = {fabric: each for (fabric, size), each in speeds.items() if size == ranks}
    return max(here, key=lambda fabric: sum(here[fabric].values()))


def _known(cell: Cell, hardware: str, workload: str, speeds: Speeds) -> Known | None:
    """None of a cell that is not one of our methods as they are by default, or whose messages were not measured on
    its fabric."""
    asked = cell.asked
    if not (cell.ok and asked["workload"] == workload and asked["hardware"] == hardware and asked["sp_size"]):
        return None
    if asked["method"] not in METHODS or asked["layout"] != BALANCED.get(asked["method"], "zigzag"):
        return None
    plain = asked["exchange"] == "collectives" and asked["placement"] != "ring_inner" and not cell.launch_note
    if not plain or any(asked[name] not in (None, 1) for name in OPTIONS) or asked["device_memory_gib"] is not None:
        return None
    if asked["linear_dtype"] not in (None, "model"):
        return None
    if asked["packing"] not in (None, "none") or any(asked[name] for name in UNKNOWN):
        return None  # the model knows whole sequences of keys and values only, each token of which sees all before it
    if workload == "train_step" and "transient" in cell.flags:
        return None  # steps of 4,096 tokens a GPU wait for the host, and equal ones differ by half
    if not {"thermal_slowdown", "uneven_devices"}.isdisjoint(cell.flags):
        return None  # one device was slower than others of its kind
    if any(cell.options[path] not in (None, usual) for path, usual in OF_STEP.items() if group_of(path) == "engine"):
        return None  # FSDP2's options move messages, which no rate has
    of_attention = workload == "attention" and asked["pass_kind"] == "forward_backward"
    if not (of_attention or (workload == "train_step" and asked["engine"] == "fsdp2")):
        return None
    ring = asked["ring_degree"] or 1
    if ring < 0 or asked["sp_size"] % ring:
        return None
    ulysses, where = asked["sp_size"] // ring, (asked["fabric"], asked["sp_size"])
    shape = AttentionShape(**{field.name: asked[field.name] for field in fields(AttentionShape) if field.name in asked})
    if asked["sp_size"] > 1 and not speeds.get(where, {}).keys() >= set(METHODS[asked["method"]]):
        return None
    method = MethodConfig(asked["method"], asked["layout"], dkv_dtype=asked["dkv_dtype"])
    work = attention_work(method, asked["kernel"], shape, (ulysses, ring), Links(speeds.get(where, {})))
    return Known(cell, cell.config, work, cell.median_step_ms or 0.0) if cell.config else None
