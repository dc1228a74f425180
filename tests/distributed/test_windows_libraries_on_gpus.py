"""Which libraries compute windows and sinks under sequence parallelism, with their own kernels: docs/METHODS.md's
table, where it takes a GPU to tell. Two ranks may share one:

    SP_BENCH_SHARE_GPUS=1 ./run_tests.sh -s -q tests/distributed/test_windows_libraries_on_gpus.py

prints a line a case: right, wrong and by how much, or what it refuses with. Output and gradients in bfloat16 over both
ranks are compared with the definition in fp64.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from oracle import NAMES, global_tensors, mesh_of
from ranks import here, run, worlds
from test_windows_libraries import needs, relative
from torch import Tensor, nn

from sp_bench import kernels
from sp_bench.attention.layouts import LayoutKind, SequenceLayout
from sp_bench.config.shape import AttentionShape
from sp_bench.methods import transformer_engine, yunchang
from sp_bench.methods._ring_flash_attn import load
from sp_bench.oracle import reduced_length

WINDOW = 100
SHAPE = AttentionShape(1, 1024, 8, 4, 64, True, "bfloat16", window=WINDOW)
SIDES = (WINDOW - 1, 0)
RIGHT = 0.03  # the relative error of bfloat16 is a tenth of it, and that of an unshifted window over 0.1
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def verdict(
    case: str, kind: LayoutKind, attend: Attend, sinks: nn.Parameter | None = None, window: int = WINDOW
) -> str:
    """right, wrong or refuses; rank 0 prints it with the largest errors of both ranks, or with the refusal. With sinks
    their gradient must be whole on each rank. `window`: as long as the sequence for none."""
    at = SequenceLayout(kind, 2).global_positions(dist.get_rank(), SHAPE.seq_len)
    inputs, shape = [x.to(here()) for x in global_tensors(SHAPE)], replace(SHAPE, window=window)
    q, k, v, dout = (x[:, at].bfloat16() for x in inputs)
    leaves, of_sinks = [x.clone().requires_grad_() for x in (q, k, v)], [] if sinks is None else [sinks]
    try:
        out = attend(*leaves).view(q.shape)
        got = [out, *torch.autograd.grad(out, [*leaves, *of_sinks], dout)]
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        found, why = "refuses", str(error).strip().split("\n")[0]
    else:
        scores = torch.full((SHAPE.num_heads,), -math.inf).to(inputs[0]) if sinks is None else sinks.detach().double()
        *want, want_sinks = reduced_length._run_with_sinks(inputs, scores, shape)
        wanted = [*(each[:, at] for each in want), *([want_sinks] if of_sinks else [])]
        errors = torch.tensor([relative(g.double(), w) for g, w in zip(got, wanted, strict=True)], device=here())
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        found = "right" if float(errors.max()) < RIGHT else "wrong"
        why = ", ".join(f"{n} {e:.1e}" for n, e in zip((*NAMES, "dsinks"), errors.tolist(), strict=False))
    if dist.get_rank() == 0:
        print(f"{case}: {found}: {why}", flush=True)
    return found


def check_transformer_engine(rank: int) -> None:
    """Each variant on each kernel that is here, with a window, with sinks (`softmax_type=learnable`), and with both."""
    from transformer_engine.pytorch import DotProductAttention  # pyright: ignore[reportMissingImports]

    names = [n for n in transformer_engine._SWITCHES if not kernels.get(n).unsupported_reason(SHAPE, "cuda")]
    drawn = torch.randn(SHAPE.num_heads, generator=torch.Generator().manual_seed(3)).to(here())
    found, right = {}, set()
    masks = ((WINDOW, False), (SHAPE.seq_len, True), (WINDOW, True))
    for variant, name, (window, has_sinks) in itertools.product(("a2a", "all_gather", "p2p"), names, masks):
        with transformer_engine._only_backend(name) as require_asked_for:
            module = DotProductAttention(
                *(SHAPE.num_heads, SHAPE.head_dim),
                num_gqa_groups=SHAPE.num_kv_heads,
                attention_dropout=0.0,
                attn_mask_type="causal",
                window_size=(-1, 0) if window == SHAPE.seq_len else (window - 1, 0),
                softmax_type="learnable" if has_sinks else "vanilla",
            )
            sinks = module.softmax_offset if has_sinks else None
            if sinks is not None:
                sinks.data.copy_(drawn)
            module.set_context_parallel_group(dist.group.WORLD, [0, 1], torch.cuda.Stream(), variant)

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out = module(q, k, v, qkv_format="bshd")  # noqa: B023
                require_asked_for()
                return out

            case = (variant, name, window, has_sinks)
            found[case] = verdict(f"TransformerEngine {case}", "zigzag", attend, sinks, window)
            if variant != "p2p" and (not has_sinks or (variant, name) == ("a2a", "cudnn")):
                right.add(case)
    assert found == {case: "right" if case in right else "refuses" for case in found}


@needs("transformer-engine")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(nccl=(2,)))
def test_transformer_engine_has_windows_but_by_p2p_and_sinks_by_a2a_on_cudnn(backend: str, sp_size: int) -> None:
    run(sp_size, check_transformer_engine, backend=backend)


def check_ring_flash_attn(rank: int) -> None:
    library, found = load(), {}
    options = {"causal": True, "window_size": SIDES}
    for name, kind in (
        ("ring_flash_attn_func", "contiguous"),
        ("zigzag_ring_flash_attn_func", "zigzag"),
        ("stripe_flash_attn_func", "striped"),
    ):
        function = getattr(library, name)
        found[name] = verdict(name, kind, lambda q, k, v: function(q, k, v, **options))  # noqa: B023
    ends = kernels.cumulative((SHAPE.seq_len,), here())
    *lengths, own_prefix = library.llama3_flash_attn_prepare_cu_seqlens(ends, True, rank, 2)

    def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (x.squeeze(0) for x in (q, k, v))
        return library.llama3_flash_attn_varlen_func(
            *packed, *lengths, heads_k_stride=4, local_k_slice=own_prefix, **options
        )

    found["llama3"] = verdict("llama3_flash_attn_varlen_func", "contiguous", gathered)
    assert found == {name: "right" if name == "llama3" else "wrong" for name in found}


@needs("ring-flash-attn")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(nccl=(2,)))
def test_the_rings_of_ring_flash_attn_are_wrong_and_its_gather_is_right(backend: str, sp_size: int) -> None:
    run(sp_size, check_ring_flash_attn, backend=backend)


def check_yunchang(rank: int) -> None:
    found = {}
    for name, kind, ring_degree in (("basic", "contiguous", 2), ("zigzag", "zigzag", 2), ("basic", "contiguous", 1)):
        mesh = mesh_of(SequenceLayout(kind, ring_degree, 2 // ring_degree))
        with yunchang._process_groups(ULYSSES_PG=mesh.get_group("ulysses"), RING_PG=mesh.get_group("ring")):
            from yunchang.hybrid import LongContextAttention  # pyright: ignore[reportMissingImports]
            from yunchang.kernels import AttnType  # pyright: ignore[reportMissingImports]

            module = LongContextAttention(ring_impl_type=name, attn_type=AttnType.FA)
            found[kind, ring_degree] = verdict(
                f"yunchang {name}, ring of {ring_degree}",
                kind,
                lambda q, k, v: module(q, k, v, causal=True, window_size=SIDES),  # noqa: B023
            )
    assert found == {case: "right" if case[1] == 1 else "wrong" for case in found}


@needs("yunchang")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(nccl=(2,)))
def test_yunchang_is_right_without_a_ring_and_wrong_with_one(backend: str, sp_size: int) -> None:
    run(sp_size, check_yunchang, backend=backend)
