"""What a trial must send and compute, by the closed forms of its method."""

from fractions import Fraction

from sp_bench.attention.layouts import shares_of_ranks
from sp_bench.config.method import MethodConfig
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
from sp_bench.costs.work import ExpectedWork, KernelCalls, attention_work, projection_flops
from sp_bench.kernels import REFERENCE
from sp_bench.methods import get, layout_of, primitive, source_of

# Of these the ranks that a rank sends to follow from the layout: all_to_all among the ulysses ranks, the rest among the
# ring ranks, or in the rings that the method says. Libraries order their groups themselves.
_PLACED = ("ulysses", "upipe", "ring", "double_ring", "all_gather", "usp")


def attention_traffic(config: TrialConfig, seq_len: int, rank: int | None = None) -> Traffic | None:
    """Bytes one rank sends off-rank in one attention call over `seq_len` tokens, forward and backward, in the mean over
    layers of several kinds; None: the method has no closed form. Where ranks send different numbers, those of `rank` of
    the world; without it, those of the rank that sends most, or where the method knows the mean alone, the mean."""
    calls, mean = config.kinds, dict[tuple[str, str], Fraction]()
    for kind, number in calls.items():
        method, shape = config.method_of(kind), config.attention_shape(seq_len, kind)
        form, differ = traffic(method.name), shape.window is not None or shape.gated_delta
        if form is None or config.workload.policy is not None:  # there each pass has its own documents and ranks
            return None
        if rank is not None and differ and method.name in OF_RANKS:
            of_kind = OF_RANKS[method.name](method, shape, config.sp_size, rank % config.sp_size)
        else:
            of_kind = form(method, shape, config.sp_size)
        mean = {**add_traffic(mean, scale_traffic(of_kind, Fraction(number, sum(calls.values()))))}
    return mean


def traffic(name: str) -> ClosedForm | None:
    """(method, shape, sp_size) -> bytes one rank sends off-rank in one attention call; None: there is none. That of our
    methods is not their own file's to say, since what they send is compared with it."""
    return OF_METHODS.get(name) or get(name).traffic


def between_nodes(config: TrialConfig, traffic: Traffic, rank: int) -> Fraction | None:
    """The bytes in `traffic` that `rank` of the world sends to other nodes; None if they have no closed form."""
    if config.method.name not in _PLACED or config.workload.name in TRAINING or traffic_is_mean(config.method.name):
        return None
    if config.workload.window is not None and config.method.name in OF_RANKS:
        return None  # borders go to several ranks
    module, cut = get(config.method.name), layout_of(config)
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


def traffic_is_mean(name: str) -> bool:
    """Whether ranks may send other numbers of bytes than the closed form, if the mean over them is it."""
    return bool(getattr(get(name), "TRAFFIC_IS_MEAN", ""))


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls | None:
    """How often `rank` of a sequence calls the kernel in one attention call; None: the method does not say."""
    own = getattr(get(method.name), "kernel_calls", None)
    return None if own is None else KernelCalls(*own(method, shape, sp_size, rank))


def outside_allocator(config: TrialConfig) -> nccl.Held:
    """How much of each kind that is outside torch's allocator a rank has where all ranks are there."""
    layout = layout_of(config)
    sends = "send_recv" in primitive(config.method) and layout.ring_degree > 1
    return nccl.counts(layout.ulysses_degree, config.ranks_per_node, sends=sends)


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
    products &= not (config.engine.facts.decoder == "transformers" and config.kernel.name == REFERENCE)
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
    layout = layout_of(config)
    flops = {kind: numbers[kind] * attention_forward_flops(shape) for kind, shape in shapes.items()}
    shares = (flops[kind] * shares_of_ranks(layout, shape)[sp_rank] for kind, shape in shapes.items())
    mine = sum(shares, Fraction(0))
    return expected.of_one(config.world_size, mine / sum(flops.values()) * sp_size / config.world_size)
