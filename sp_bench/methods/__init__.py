"""Sequence-parallel attention methods. One file a method; adapters to other libraries are methods too.

To add one to this package: a file with the functions of `Method`, its name in NAMES, conf/method/<name>.yaml, and a
line in the parametrised tests; of a library, a line in sp_bench/costs/patterns.py and in its table in docs/METHODS.md
too. Module level imports no torch: planning reads `unsupported_reason` and `traffic` without it. A method that stays
outside needs its own file or package only: docs/OUTSIDE.md.
"""

import importlib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, cast

from sp_bench import hardware
from sp_bench.attention.layouts import SequenceLayout, shares_of_ranks
from sp_bench.config import outside
from sp_bench.config.method import MethodConfig
from sp_bench.config.outside import CannotImport, Source
from sp_bench.config.parsing import SCALARS, ConfigError, parse
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import TRAINING
from sp_bench.costs import nccl
from sp_bench.costs import training as training_costs
from sp_bench.costs.attention import (
    OF_METHODS,
    OF_RANKS,
    ClosedForm,
    Traffic,
    add_traffic,
    attention_forward_flops,
    computed,
    scale_traffic,
)
from sp_bench.costs.links import far_share
from sp_bench.costs.work import ExpectedWork, KernelCalls, attention_work, projected_tokens, projection_flops
from sp_bench.kernels import REFERENCE, Kernel

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from sp_bench.attention.autograd import Kept

NAMES = (
    *("single", "ulysses", "upipe", "ring", "double_ring", "all_gather", "usp", "state_passing"),
    *("ring_flash_attn", "deepspeed_ulysses", "yunchang", "torch_context_parallel", "transformer_engine"),
    *("deepspeed_ulysses_hf", "ring_flash_attn_llama3"),
)


@dataclass(frozen=True)
class SequenceParallelAttention:
    """What an opened method yields: an attention function, and which tokens its ranks hold."""

    layout: SequenceLayout
    attend: "Callable[..., Tensor]"  # an `Attend` of ours, or a library's function of q, k and v

    def with_sinks(self, sinks: "Tensor | None") -> "SequenceParallelAttention":
        """The same with these sinks [Hq], in a method that takes them. Their gradient is this rank's share."""
        if sinks is None:
            return self
        return replace(self, attend=lambda q, k, v, kept=None: self(q, k, v, kept, sinks))

    def of_latents(self, kernel: Kernel, head_dim: int) -> "SequenceParallelAttention":
        """The same of q, latents and up-projections: each rank makes keys and values of its own, which then travel."""
        from sp_bench.attention.latent import projection

        made = projection(kernel)
        return replace(self, attend=lambda q, latent, up: self.attend(q, *made(latent, up, head_dim)))

    def __call__(self, q: "Tensor", k: "Tensor", v: "Tensor", *rest: "Kept | Tensor | None") -> "Tensor":
        """q [B,S/P,Hq,D], k and v [B,S/P,Hkv,D] -> [B,S/P,Hq,D]; differentiable; tokens in `layout` order. rest: of
        methods of this package that are ours a `Kept` or None, and sinks [Hq]; of the gated delta rule g and beta."""
        return self.attend(q, k, v, *rest)


class Method(Protocol):
    """A module of this package, or from outside. It may also have

    - `PACKS = True`: it also computes packed documents (`AttentionShape.documents`), each of which sees itself only;
    - `CUTS_DOCUMENTS = True`: it also computes them in the layout document_zigzag;
    - `CONVERTS = True`: it also has the layout zigzag_by_kind;
    - `OWN_PACKED_KERNELS`: names of kernels of which the library has an own binding that takes packed documents, while
      ours takes none;
    - `NO_PACKS`: what it lacks for that, for those who ask for it;
    - `WINDOWS = True`: it also computes windows (`AttentionShape.window`) and sinks, which its `attend` then takes;
    - `GATED_DELTA = True`: it also computes the gated delta rule (`AttentionShape.gated_delta`);
    - `LATENTS = True`: it also sends latents (`MethodConfig.sends`) in the place of keys and values;
    - `Options`, from outside only: a frozen dataclass of its own options, found in `MethodConfig.own`;
    - `ring_degrees` and `send_rings`, as in double_ring: the two rings that its tensors travel around;
    - `TRAFFIC_IS_MEAN`: why ranks send different numbers of bytes, of which `traffic` is the mean;
    - `kernel_calls(method, shape, sp_size, rank)`: how often that rank of a sequence calls the kernel in one attention
      call. Without it, the attention's FLOPs and launches are not counted: the library has a kernel of its own, or
      the number of calls is unknown.
    """

    IMPLEMENTATION: str  # whose code: sp_bench, or the library and its version (`installed`)
    PRIMITIVE: str | Mapping[str, str]  # the collective that moves the attention tensors; of each variant, if several
    # (method, shape, sp_size) -> bytes one rank sends off-rank in one attention call, forward and backward. The bytes
    # that a step sends must equal it. None: there is no closed form, and bytes are counted only. Adapters and methods
    # from outside have it; that of our methods is in OF_METHODS of costs/attention.py (`closed_form`).
    traffic: ClosedForm | None

    @staticmethod
    def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
        """Which token lives where.

        Raises:
            ConfigError: options that no shape could make valid.
        """
        ...

    @staticmethod
    def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
        """Why this method cannot split `shape` and run that kernel on the parts, naming what would work, or None.

        Whether `seq_len` can be cut is the layout's to say.
        """
        ...

    @staticmethod
    def open(
        method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
    ) -> AbstractContextManager[SequenceParallelAttention]:
        """`mesh` has the axes `ring` and `ulysses` innermost, in the layout's placement order, so that a rank of the
        world modulo sp_size is its rank in the sequence."""
        ...


def installed(package: str) -> str:
    """`package==version` of a library here, or its name alone where it is not installed."""
    version = hardware.package_versions().get(package)
    return f"{package}=={version}" if version else package


def missing_library_reason(method: str, extra: str, *packages: str) -> Prose | None:
    """Why an adapter cannot run without the package that `extra` is named after, and `packages`, or None."""
    if not (missing := hardware.missing_packages(extra, *packages)):
        return None
    return f"method {method} needs {' and '.join(missing)}: pip install 'sp-bench[{extra}]'"


def primitive(method: MethodConfig) -> str:
    """The collective that moves the attention tensors.

    Raises:
        ConfigError: a variant that the method does not have.
    """
    own = get(method.name).PRIMITIVE
    if isinstance(own, str) and method.variant is not None:
        raise ConfigError(f"method.variant={method.variant}: {method.name} has no variants; leave it out")
    if not isinstance(own, str):
        if method.variant is None or method.variant not in own:
            raise ConfigError(f"method.variant={method.variant}: {method.name} has {', '.join(own)}")
        return own[method.variant]
    return own


def packing_reason(method: MethodConfig, shape: AttentionShape) -> Prose | None:
    """Why the method cannot compute packed documents, naming those that can, or None; and why its layout, which cuts
    documents, has none to cut."""
    module = get(method.name)
    cutting = [name for name in NAMES if getattr(get(name), "CUTS_DOCUMENTS", False)]
    cuts = getattr(module, "CUTS_DOCUMENTS", False)
    if method.layout == "document_zigzag":
        if shape.documents and shape.window is not None:
            return "method.layout=document_zigzag: under a window contiguous shards have equal work; use contiguous"
        if cuts and shape.documents:
            return None
        way_out: Prose = "method.layout=zigzag" if cuts else f"method={', '.join(cutting)}"
        return f"method.layout=document_zigzag is for packed documents, in some methods; use {way_out}"
    if not shape.documents:
        return None
    if not getattr(module, "PACKS", False):
        if cuts:
            return f"method {method.name} computes packed documents in one layout; use method.layout=document_zigzag"
        able = ", ".join(name for name in NAMES if getattr(get(name), "PACKS", False))
        why: Prose = getattr(module, "NO_PACKS", "") or "it does not say that it can"
        return f"method {method.name} computes no packed documents here: {why}; use method={able}"
    if method.layout == "striped":
        return "method.layout=striped cuts packed documents into single tokens; use contiguous or zigzag"
    return None


def window_reason(method: MethodConfig, shape: AttentionShape) -> Prose | None:
    """Why the method cannot compute a window or sinks, naming those that can, or None."""
    if (shape.window is None and not shape.sinks) or getattr(get(method.name), "WINDOWS", False):
        return None
    able = ", ".join(name for name in NAMES if getattr(get(name), "WINDOWS", False))
    lacking: Prose = "sinks" if shape.window is None else "windows"
    return f"method {method.name} computes no {lacking} here; use method={able}"


def values_reason(method: MethodConfig, shape: AttentionShape) -> Prose | None:
    """Why the method cannot take latents, or values of another size than keys, naming those that can, or None."""
    if method.sends == "latent" and not getattr(get(method.name), "LATENTS", False):
        able = ", ".join(name for name in NAMES if getattr(get(name), "LATENTS", False))
        return f"method {method.name} sends no latents; use method={able}, or method.sends=null"
    ours = get(method.name).IMPLEMENTATION == "sp_bench"
    if ours or (shape.value_dim == shape.head_dim and shape.kv_lora_rank is None):
        return None
    able = ", ".join(name for name in NAMES if get(name).IMPLEMENTATION == "sp_bench")
    what: Prose = "values of another size than keys" if shape.kv_lora_rank is None else "latents"
    return f"method {method.name} was not tried with {what}; use method={able}"


def delta_reason(method: MethodConfig, shape: AttentionShape) -> Prose | None:
    """Why the method does not compute the gated delta rule, naming those that do, or None."""
    if not shape.gated_delta or getattr(get(method.name), "GATED_DELTA", False):
        return None
    able = ", ".join(name for name in NAMES if getattr(get(name), "GATED_DELTA", False))
    return f"method {method.name} does not compute the gated delta rule here; use method={able}"


def conversion_reason(method: MethodConfig, kinds: Collection[str]) -> Prose | None:
    """Why the method cannot compute layers of these kinds, full | window, each in a layout of its own, or None."""
    if method.layout != "zigzag_by_kind":
        return None
    able = ", ".join(name for name in NAMES if getattr(get(name), "CONVERTS", False))
    if method.name not in able.split(", "):
        return f"method.layout=zigzag_by_kind: method {method.name} does not convert; use method={able}, or zigzag"
    if method.sends == "latent":
        return "method.sends=latent, method.layout=zigzag_by_kind: latents are not converted; use method.layout=zigzag"
    if "window" in kinds:
        return None
    return "method.layout=zigzag_by_kind converts under a window, and there is none; use method.layout=zigzag"


def names() -> list[str]:
    """All methods: ours, then those from outside."""
    return [*NAMES, *outside.sources("method", NAMES)]


def get(name: str) -> Method:
    """The method called `name`. One that cannot be imported comes as a stand-in that raises the error in `open`: its
    trials end as `error`, and a sweep goes on.

    Raises:
        ConfigError: no such method (the nearest name and all names are given), or one that lacks something.
    """
    if name in NAMES:
        return cast(Method, importlib.import_module(f"{__name__}.{name}"))
    source = outside.require_source("method", name, NAMES)
    try:
        return _checked(source, outside.load(source))
    except CannotImport as error:
        return _stand_in(error)


def source_of(name: str) -> Source | None:
    """Where a method from outside comes from; None: it is one of ours, or there is none of that name."""
    return outside.source_of("method", name, NAMES)


def import_error(name: str) -> str | None:
    """Why a method from outside cannot be imported, or None."""
    if source := source_of(name):
        try:
            outside.load(source)
        except CannotImport as error:
            return str(error)
    return None


_EXAMPLES: Mapping[str, Prose] = {
    "IMPLEMENTATION": 'IMPLEMENTATION = "my_lab"  # whose code',
    "PRIMITIVE": 'PRIMITIVE = "send_recv"  # the collective that moves the attention tensors',
    "layout": "def layout(method, sp_size): return SequenceLayout(method.layout, ring_degree=sp_size)",
    "unsupported_reason": "def unsupported_reason(method, kernel_name, shape, sp_size): return None",
    "traffic": "def traffic(method, shape, sp_size): return ring_traffic(shape, sp_size, 1, None), or traffic = None "
    "if the bytes have no closed form",
    "open": "@contextmanager, def open(method, kernel, shape, mesh): yield SequenceParallelAttention(layout, attend)",
}
_CALLS_EXAMPLE: Mapping[str, Prose] = {
    "kernel_calls": "def kernel_calls(method, shape, sp_size, rank): return 1, 1  # forward, backward"
}
_NUM_ARGUMENTS = {"layout": 2, "unsupported_reason": 4, "traffic": 3, "open": 4}


def _checked(source: Source, module: Any) -> Method:
    """`module`, if it has all that a method from outside must have.

    Raises:
        ConfigError: one line that names the source, the attribute and how it is written.
    """
    outside.require(source, module, _EXAMPLES, _NUM_ARGUMENTS, may_be_none="traffic")
    for name in ("IMPLEMENTATION", "PRIMITIVE"):
        if not isinstance(getattr(module, name), str):
            raise ConfigError(f"{source}: {name} must be text; write: {_EXAMPLES[name]}")
    if module.IMPLEMENTATION == "sp_bench":
        raise ConfigError(
            f"{source}: IMPLEMENTATION = sp_bench says that it is ours; write: {_EXAMPLES['IMPLEMENTATION']}"
        )
    if hasattr(module, "kernel_calls"):
        outside.require(source, module, _CALLS_EXAMPLE, {"kernel_calls": 4})
    _check_options(source, getattr(module, "Options", None))
    return cast(Method, module)


def _check_options(source: Source, options: Any) -> None:
    if options is None:
        return
    if not (isinstance(options, type) and is_dataclass(options) and options.__dataclass_params__.frozen):  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            f"{source}: Options is no frozen dataclass; write @dataclass(frozen=True) above class Options"
        )
    kinds = typing.get_type_hints(options)
    for field in fields(options):
        said: Prose = f"{source}: Options.{field.name}"
        if field.name in ("name", "path", *_FIELDS):
            raise ConfigError(f"{said} is a field of every method's config; give it another name")
        if field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{said} has no default; write: {field.name}: int = 1")
        if not _is_plain(kinds[field.name]):
            raise ConfigError(f"{said} must be int, float, bool, str or a Literal of them, or one of these | None")


_FIELDS = tuple(field.name for field in fields(MethodConfig))


def _is_plain(kind: Any) -> bool:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind, *others = typing.get_args(kind)
        if others != [type(None)]:
            return False
    return kind in SCALARS or typing.get_origin(kind) is Literal


def _stand_in(error: CannotImport) -> Method:
    def open(*_: Any) -> NoReturn:
        raise ImportError(str(error))

    stand_in = types.SimpleNamespace(
        IMPLEMENTATION="cannot be imported",
        PRIMITIVE="unknown",
        layout=lambda method, sp_size: SequenceLayout(method.layout, ring_degree=sp_size),
        unsupported_reason=lambda *_: None,
        traffic=None,
        open=open,
    )
    return cast(Method, stand_in)


def add_file(path: Path) -> str:
    """Make the method of a file known to this process; returns its name.

    Raises:
        ConfigError: no such file, or another method of that name.
    """
    name = outside.add_file(path)
    names()  # refuses a name that is taken
    return name


def outside_choice(name: str) -> dict[str, Any] | None:
    """What conf/method/<name>.yaml would say of a method from outside: its fields and its own options, side by side, at
    their defaults. None: no method from outside."""
    if source_of(name) is None:
        return None
    options = getattr(get(name), "Options", None)
    return {"name": name, "layout": "contiguous"} | (asdict(options()) if options else {})


def with_own_options(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The `method` of a composed trial, as `parse(MethodConfig, ...)` takes it: own options of a method from outside,
    which stand beside the fields there, are checked and put into `own`.

    Raises:
        ConfigError: no such option, or a value that it cannot have.
    """
    name = mapping["name"]
    own = {key: value for key, value in mapping.items() if key not in _FIELDS}
    if not own or source_of(name) is None:
        return dict(mapping)
    if not import_error(name):  # what cannot be imported cannot say what its options are
        try:
            own = asdict(parse(getattr(get(name), "Options"), own, "method"))  # noqa: B009
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"method {name}: {error}") from None
    return {key: value for key, value in mapping.items() if key in _FIELDS} | {"own": own}


def attention_traffic(config: TrialConfig, seq_len: int, rank: int | None = None) -> Traffic | None:
    """Bytes one rank sends off-rank in one attention call over `seq_len` tokens, forward and backward, in the mean over
    layers of several kinds; None: the method has no closed form. Where ranks send different numbers, those of `rank` of
    the world; without it, those of the rank that sends most, or where the method knows the mean alone, the mean."""
    calls, mean = config.kinds, dict[tuple[str, str], Fraction]()
    for kind, number in calls.items():
        method, shape = config.method_of(kind), config.attention_shape(seq_len, kind)
        form, differ = closed_form(method.name), shape.window is not None or shape.gated_delta
        if form is None or config.workload.policy is not None:  # there each pass has its own documents and ranks
            return None
        if rank is not None and differ and method.name in OF_RANKS:
            of_kind = OF_RANKS[method.name](method, shape, config.sp_size, rank % config.sp_size)
        else:
            of_kind = form(method, shape, config.sp_size)
        mean = {**add_traffic(mean, scale_traffic(of_kind, Fraction(number, sum(calls.values()))))}
    return mean


def closed_form(name: str) -> ClosedForm | None:
    """(method, shape, sp_size) -> bytes one rank sends off-rank in one attention call; None: there is none. That of our
    methods is not their own file's to say, since what they send is compared with it."""
    return OF_METHODS.get(name) or get(name).traffic


# Of these the ranks that a rank sends to follow from the layout: all_to_all among the ulysses ranks, the rest among the
# ring ranks, or in the rings that the method says. Libraries order their groups themselves.
_PLACED = ("ulysses", "upipe", "ring", "double_ring", "all_gather", "usp")


def between_nodes(config: TrialConfig, traffic: Traffic, rank: int) -> Fraction | None:
    """The bytes in `traffic` that `rank` of the world sends to other nodes; None if they have no closed form."""
    if config.method.name not in _PLACED or config.workload.name in TRAINING or traffic_is_mean(config.method.name):
        return None
    if config.workload.window is not None and config.method.name in OF_RANKS:
        return None  # borders go to several ranks
    module = get(config.method.name)
    cut = module.layout(config.method, config.sp_size)
    places = [cut.coordinates(member) for member in range(config.sp_size)]
    ring_rank, ulysses_rank = places[rank]
    ring = [member for member, place in enumerate(places) if place[1] == ulysses_rank]
    ulysses = [member for member, place in enumerate(places) if place[0] == ring_rank]
    send_rings = getattr(module, "send_rings", None)
    rings = [(ring, Fraction(1))] if send_rings is None else send_rings(config.method, config.sp_size, rank)
    far = Fraction(0)
    for (_, op), size in traffic.items():
        for members, part in [(ulysses, Fraction(1))] if op == "all_to_all" else rings:
            far += size * part * far_share(op, members, members.index(rank), config.ranks_per_node)
    return far


def ring_degrees(method: MethodConfig, sp_size: int) -> tuple[int, int] | None:
    """The ranks of the inner and of the outer ring, of a method that has both."""
    own = getattr(get(method.name), "ring_degrees", None)
    return None if own is None else own(method, sp_size)


def traffic_is_mean(name: str) -> bool:
    """Whether ranks may send other numbers of bytes than the closed form, if the mean over them is it."""
    return bool(getattr(get(name), "TRAFFIC_IS_MEAN", ""))


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls | None:
    """How often `rank` of a sequence calls the kernel in one attention call; None: the method does not say."""
    own = getattr(get(method.name), "kernel_calls", None)
    return None if own is None else KernelCalls(*own(method, shape, sp_size, rank))


def outside_allocator(config: TrialConfig) -> nccl.Held:
    """How much of each kind that is outside torch's allocator a rank has where all ranks are there."""
    method = get(config.method.name)
    layout = method.layout(config.method, config.sp_size)
    sends = "send_recv" in primitive(config.method) and layout.ring_degree > 1
    return nccl.counts(layout.ulysses_degree, config.ranks_per_node, sends=sends)


def real_place(config: TrialConfig) -> int | None:
    """The rank of the world that is there; None: all are. By default the one that computes most attention. Of equals
    rank 0, which has a whole shard of parameters that do not divide evenly; under a window the middle one, which both
    receives and sends; of states the last one, which puts the most together."""
    if config.world == "ranks" or config.real_rank is not None:
        return config.real_rank
    if config.model.attention == "gated_delta" or config.method.states:
        return config.world_size - 1
    layout = get(config.method.name).layout(config.method, config.sp_size)
    of_kinds = [
        [number * attention_forward_flops(shape) * share for share in shares_of_ranks(layout, shape)]
        for kind, number in config.kinds.items()
        for shape in [config.attention_shape(config.seq_len, kind)]
    ]
    work = [sum(of_rank) for of_rank in zip(*of_kinds, strict=True)]
    usual = config.sp_size // 2 if "window" in config.kinds else 0
    return usual if work[usual] == max(work) else work.index(max(work))


def is_lower_bound(config: TrialConfig) -> bool:
    """Whether the one rank of a world may have to wait for others, which compute more or at other times: its step takes
    at least as long as measured. Under a window the first ranks see less, and none waits for them."""
    if (place := real_place(config)) is None:
        return False
    layout = get(config.method.name).layout(config.method, config.sp_size)
    for kind in config.kinds:
        shape = config.attention_shape(config.seq_len, kind)
        shares = shares_of_ranks(layout, shape)
        if len(set(shares)) > 1 and (
            shape.window is None or shape.documents or shares[place % config.sp_size] < max(shares)
        ):
            return True
        if shape.kv_lora_rank is not None:
            projected = [projected_tokens(config.method, shape, config.sp_size, rank) for rank in range(config.sp_size)]
            if projected[place % config.sp_size] < max(projected):
                return True
    return False


def expected_work(config: TrialConfig, padded_len: int, rank: int) -> ExpectedWork:
    """What one step must compute over sequences of `padded_len` tokens; the calls of the kernel are those of `rank` of
    the world."""
    if config.workload.name == "collective" or config.workload.policy is not None:
        return ExpectedWork()
    name, sp_size, sp_rank = config.method.name, config.sp_size, rank % config.sp_size
    shapes = {kind: config.attention_shape(padded_len, kind) for kind in config.kinds}
    calls = {
        kind: of_kind
        for kind, shape in shapes.items()
        if (of_kind := kernel_calls(config.method_of(kind), shape, sp_size, sp_rank)) is not None
    }
    # A method from outside that does not say how it calls the kernel may multiply matrices anywhere.
    products = bool(calls) or source_of(name) is None
    # Nothing tells the products of torch's sdpa on its math backend from those of transformers' layers.
    products &= not (config.engine.name in training_costs.HUGGING_FACE and config.kernel.name == REFERENCE)
    # Those that put states together are in the method, by no closed form.
    products &= all(config.method_of(kind).name != "state_passing" for kind in config.kinds)
    if config.workload.name in TRAINING:
        numbers = training_costs.attended(config)
        expected = training_costs.expected_work(config, padded_len, rank, calls or None, products=products)
    else:
        numbers, ((kind, shape),) = config.kinds, shapes.items()
        backward = config.workload.pass_kind == "forward_backward"
        ranks = range(sp_size) if config.world == "ranks" else [sp_rank] * config.world_size
        projection = projection_flops(config.method, shape, sp_size, ranks, backward=backward)
        of_kernel = computed(config.method, shape)
        expected = attention_work(of_kernel, calls.get(kind), projection, backward=backward, products=products)
    if config.world == "ranks":
        return expected
    layout = get(name).layout(config.method, sp_size)
    flops = {kind: numbers[kind] * attention_forward_flops(shape) for kind, shape in shapes.items()}
    shares = (flops[kind] * shares_of_ranks(layout, shape)[sp_rank] for kind, shape in shapes.items())
    mine = sum(shares, Fraction(0))
    return expected.of_one(config.world_size, mine / sum(flops.values()) * sp_size / config.world_size)


@contextmanager
def opened(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    """The method's attention of what a step of `shape` begins with: q, k and v, or q, latents and up-projections."""
    with get(method.name).open(method, kernel, shape, mesh) as attention:
        projects = shape.kv_lora_rank is not None and method.sends is None
        yield attention.of_latents(kernel, shape.head_dim) if projects else attention


def open_counted(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> AbstractContextManager[SequenceParallelAttention]:
    """The method, opened with `kernel`, whose calls the ledger counts if the method says how many there are."""
    from sp_bench.measure.ledger import CountedKernel

    module = get(method.name)
    counts = hasattr(module, "kernel_calls") and not shape.gated_delta  # of which each call is counted anyway
    return opened(method, CountedKernel(kernel) if counts else kernel, shape, mesh)
