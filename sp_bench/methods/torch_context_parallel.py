"""Adapter: torch's own context parallelism, `torch.distributed.tensor.experimental.context_parallel`.

While it is entered, scaled_dot_product_attention (SDPA) computes attention over all ranks' shards. It is entered for as
long as the method is open. SDPA takes [B,H,S/P,D], which are views of our tensors. context_parallel also wants a buffer
to cut; it gets a dummy, since the trial's tensors are cut already.

Variants are its rotate methods. `allgather`: K and V by one all-gather. `alltoall`: K and V hop by hop, in all-to-alls
of which each has one receiver, and not by torch's send and receive. In both, dK and dV travel in such all-to-alls, P
hops in fp32, because a rank's own contribution goes all the way round too. Its head-tail load balancing is our zigzag
layout, for causal masks only; without it the layout is contiguous. The kernel is one of SDPA's backends.

Closing restores SDPA and its backends, DTensor's dispatch, and the options of context parallelism; also after an error,
which torch 2.11 by itself does not do. What stays is the DTensor module with its cache of shardings.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from sp_bench import kernels
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.prose import Prose
from sp_bench.config.shape import ELEMENT_BYTES, AttentionShape
from sp_bench.costs.attention import Traffic, add_traffic, kv_shard_elements
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, installed

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = installed("torch")
PRIMITIVE = {"allgather": "all_gather+all_to_all", "alltoall": "all_to_all"}
NO_PACKS: Prose = "it shards scaled_dot_product_attention, which takes no lengths of documents"

_BACKENDS = {"sdpa_flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}  # names in torch.nn.attention.SDPBackend


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    if method.layout == "striped":
        raise ConfigError("method.layout=striped: torch_context_parallel has no such layout; use contiguous or zigzag")
    return SequenceLayout(method.layout, ring_degree=sp_size)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if kernel_name in ("math", "cpu_flash"):
        return (
            f"torch_context_parallel shards neither the SDPA of CPUs nor its math fallback, kernel={kernel_name}; "
            "use kernel=sdpa_flash or cudnn on GPUs"
        )
    if kernel_name not in _BACKENDS:
        return f"torch_context_parallel shards SDPA, not kernel={kernel_name}; use kernel=sdpa_flash or cudnn"
    if not shape.causal and method.layout == "zigzag":
        return (
            "workload.causal=false: the load balancing of torch_context_parallel (zigzag) is causal only; "
            "use method.layout=contiguous"
        )
    return None


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    """As the ring, with dK/dV one hop further and in fp32: forward (P-1) n e bytes, backward (P-1) n e + P n 4 bytes.

    n: elements of one rank's K and V; e: bytes an element.
    """
    n, rotate = kv_shard_elements(shape, sp_size), "all_gather" if method.variant == "allgather" else "all_to_all"
    kv = (sp_size - 1) * n * shape.element_bytes
    hops = sp_size if sp_size > 1 else 0  # a single rank sends to itself, which is not traffic
    dkv = hops * n * ELEMENT_BYTES["float32"]
    return add_traffic({("forward", rotate): kv}, {("backward", rotate): kv}, {("backward", "all_to_all"): dkv})


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from sp_bench.measure import ledger

    backend = next(getattr(SDPBackend, choice) for name, choice in _BACKENDS.items() if kernels.get(name) is kernel)
    grouped, scale = shape.num_heads != shape.num_kv_heads, shape.head_dim**-0.5

    def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        # [B,S/P,H,D] -> [B,H,S/P,D]: views, since the backends read strides
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with ledger.attention():
            # looked up at each call, because context_parallel replaces it
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, scale=scale, enable_gqa=grouped
            )
        mark_backward(out)
        return out.transpose(1, 2)

    with _context_parallel(method, mesh), sdpa_kernel(backend):
        yield SequenceParallelAttention(layout(method, mesh["ring"].size()), attend)


@contextmanager
def _context_parallel(method: MethodConfig, mesh: "DeviceMesh") -> Iterator[None]:
    import torch
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.distributed.tensor.experimental._context_parallel import _attention as state

    ring = mesh["ring"]
    with restored() as at_exit:
        set_rotate_method(str(method.variant))
        state._cp_options.enable_load_balance = method.layout == "zigzag"
        dummy = torch.zeros(2 * ring.size(), device=ring.device_type)
        entered = context_parallel(ring, buffers=[dummy], buffer_seq_dims=[0], no_restore_buffers={dummy})
        entered.__enter__()
        # if torch 2.11 learned of an error, it would undo nothing
        at_exit.callback(entered.__exit__, None, None, None)
        yield


@contextmanager
def restored() -> Iterator[ExitStack]:
    """Restores the options of torch's context parallelism, and what it replaced. Yields a stack for what comes before
    that."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as state

    with ExitStack() as stack:
        stack.callback(vars(state._cp_options).update, dict(vars(state._cp_options)))
        stack.callback(setattr, state, "_dispatch_mode", state._dispatch_mode)
        # torch's own list of replaced functions never shrinks: it would keep each patch, and the mesh with it
        stack.callback(setattr, state, "_replaced_functions", dict(state._replaced_functions))
        yield stack


def mark_backward(out: "Tensor") -> None:
    """Tell the ledger which autograd node issues the collectives of the backward of `out`, which SDPA under context
    parallelism gave: SDPA's, which the node that unwraps the DTensor follows."""
    from sp_bench.measure import ledger

    node = out.grad_fn
    while node is not None and not node.name().startswith("ScaledDotProduct"):
        node = node.next_functions[0][0]
    if out.grad_fn is not None:
        assert node is not None, "context_parallel ran no fused SDPA"
        ledger.mark_node_as_attention(node)
