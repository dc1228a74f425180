"""The oracle of the distributed tests: torch's own attention on the whole sequence, differentiated by autograd."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from ranks import here
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sp_bench import kernels, methods
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape

NAMES = ("output", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    method: MethodConfig
    shape: AttentionShape
    kernel: str = "math"

    def __str__(self) -> str:
        m, s = self.method, self.shape
        degrees = (m.ulysses_degree, m.inner_ring_degree, m.placement)
        chosen = (m.layout, m.variant, *degrees, m.dkv_dtype, m.head_stride, m.head_chunks, m.head_stages, m.exchange)
        options = "/".join(str(o) for o in chosen if o)
        mask = "causal" if s.causal else "full"
        sizes = f"{s.num_heads}/{s.num_kv_heads} heads S={s.seq_len} B={s.batch_size}"
        return f"{m.name}/{options} {self.kernel} {sizes} {mask} {s.dtype}"


def mesh_of(layout: SequenceLayout) -> DeviceMesh:
    """The ring x ulysses mesh of a layout, in its placement order. Layouts of equal degrees share one, because
    communicators take time."""
    degrees = {"ring": layout.ring_degree, "ulysses": layout.ulysses_degree}
    names = ("ring", "ulysses") if layout.ulysses_inner else ("ulysses", "ring")
    return _mesh(dist.group.WORLD, names, tuple(degrees[name] for name in names))


@cache
def _mesh(world: dist.ProcessGroup, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(here().type, sizes, mesh_dim_names=names)


def on_meshes(cases: Iterable[Case]) -> Iterator[tuple[Case, DeviceMesh]]:
    """Each case with the mesh of its layout."""
    for case in cases:
        yield case, mesh_of(methods.get(case.method.name).layout(case.method, dist.get_world_size()))


@cache
def global_tensors(shape: AttentionShape, seed: int = 0) -> list[Tensor]:
    """q, k, v and dout of the whole sequence in fp64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(shape.batch_size, shape.seq_len, *of_heads) for of_heads in shape.heads]
    # rounded to the case's dtype first, so that the oracle and the case have exactly the same inputs
    dtype = getattr(torch, shape.dtype)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).double() for size in sizes]


@cache
def oracle(shape: AttentionShape) -> list[Tensor]:
    """output, dq, dk, dv of the whole sequence in fp64."""
    q, k, v, dout = global_tensors(shape)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), is_causal=shape.causal, enable_gqa=True
    ).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_method(case: Case, mesh: DeviceMesh) -> tuple[list[Tensor], Tensor]:
    """This rank's output, dq, dk, dv, and the global positions of its tokens."""
    method = methods.get(case.method.name)
    layout = method.layout(case.method, mesh.size())
    positions = torch.tensor(layout.global_positions(dist.get_rank(), case.shape.seq_len))
    dtype = getattr(torch, case.shape.dtype)
    q, k, v, dout = (x[:, positions].to(here(), dtype) for x in global_tensors(case.shape))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with method.open(case.method, kernels.get(case.kernel), case.shape, mesh) as attention:
        assert attention.layout == layout
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)], positions


def relative_errors(case: Case, mesh: DeviceMesh) -> dict[str, float]:
    """Relative L2 error of this rank's shard, of output and each gradient."""
    mine, positions = run_method(case, mesh)
    return {
        name: float((got.double().cpu() - want[:, positions]).norm() / want[:, positions].norm())
        for name, got, want in zip(NAMES, mine, oracle(case.shape), strict=True)
    }
