"""TransformerEngine's context parallelism: parity on GPUs where it is installed.

With stand-ins for the library: what the adapter passes to it, and what the adapter restores. That for whole sequences
does not compute attention, so those tests say nothing about parity. That for packed documents does: by the lengths that
it is given, over the tokens that the library would take for those of each rank. So it proves layout and lengths, and
says nothing about the library's kernels and bytes.
"""

import itertools
import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from oracle import Case, mesh_of, on_meshes, relative_errors
from ranks import here, run, worlds
from test_ledger import check
from test_libraries import needs

from sp_bench import kernels, methods
from sp_bench.attention.autograd import differentiable
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.measure import ledger
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.ledger import Ledger
from sp_bench.methods.transformer_engine import _require
from sp_bench.oracle import reduced_length

NAME = "transformer_engine"
P2P, GATHER, A2A = (MethodConfig(NAME, "zigzag", variant) for variant in ("p2p", "all_gather", "a2a"))
HIERARCHICAL = MethodConfig(NAME, "zigzag", "a2a+p2p", 2)
PACKED = [replace(method, layout="document_zigzag") for method in (P2P, GATHER, A2A, HIERARCHICAL)]
PACKS = [(16, 32, 48, 24, 24), (72, 72), (16,) * 9]


def cases(sp_size: int) -> list[Case]:
    chosen = []
    for method, kernel, hkv, causal, batch in itertools.product(
        (P2P, GATHER, A2A, HIERARCHICAL), ("flash_attn", "flash_attn_4", "cudnn"), (8, 4, 1), (True, False), (1, 2)
    ):
        shape = AttentionShape(batch, 128 * sp_size, 8, hkv, 64, causal, "bfloat16")
        own = kernels.get(kernel).unsupported_reason(shape, here().type)
        if not (own or methods.get(NAME).unsupported_reason(method, kernel, shape, sp_size)):
            chosen.append(Case(method, shape, kernel))
    return chosen


def check_parity(rank: int, sp_size: int) -> None:
    tried = 0
    for case, mesh in on_meshes(cases(sp_size)):
        errors = relative_errors(case, mesh)
        assert max(errors.values()) < 1e-2, f"{case} on rank {rank}: {errors}"
        check(case, mesh)
        tried += 1
    assert tried >= 24


@needs("transformer-engine")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(nccl=(2, 4)))
def test_transformer_engine_agrees_with_the_oracle_and_sends_what_its_sources_say(backend: str, sp_size: int) -> None:
    run(sp_size, check_parity, sp_size, backend=backend)


def check_packs(rank: int, sp_size: int) -> None:
    """Both proofs and the bytes, of whatever the library computes of packs."""
    tried = 0
    for method, name, hkv in itertools.product(PACKED, ("flash_attn", "flash_attn_4", "cudnn"), (8, 4)):
        for documents in PACKS:
            lengths = tuple(16 * length for length in documents)
            shape, kernel = AttentionShape(1, sum(lengths), 8, hkv, 64, True, "bfloat16", lengths), kernels.get(name)
            own = kernel.unsupported_reason(shape, here().type)
            if own or methods.get(NAME).unsupported_reason(method, name, shape, sp_size):
                continue
            mesh = mesh_of(methods.get(NAME).layout(method, sp_size))
            with methods.get(NAME).open(method, kernel, shape, mesh) as attention:
                reduced_length.check_attention(attention, kernel, name, shape, mesh, here(), seed=0)
            check(Case(method, shape, name), mesh)
            tried += 1
    assert tried >= 6


@needs("transformer-engine")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(nccl=(2, 4)))
def test_transformer_engine_on_packs_passes_both_proofs_and_sends_as_much(backend: str, sp_size: int) -> None:
    run(sp_size, check_packs, sp_size, backend=backend)


class Reduced(torch.autograd.Function):
    """Issues a collective in forward and backward, as the library's function does."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return Reduced.backward(ctx, tensor)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


SWITCHES = {
    "flash_attn": ["NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2"],
    "flash_attn_4": ["NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V4"],
    "cudnn": ["NVTE_FUSED_ATTN"],
}


def switched_on() -> list[str]:
    return sorted(name for name in os.environ if name.startswith("NVTE_") and os.environ[name] == "1")


class StandIn:
    """A stand-in for DotProductAttention. It records what it is given, and chooses its backend by the environment."""

    told: tuple[Any, ...] = ()
    state: dict[str, Any]

    def __init__(self, num_attention_heads: int, kv_channels: int, **options: Any) -> None:
        assert (num_attention_heads, kv_channels) == (4, 8)
        softmax = {"attention_dropout": 0.0, "softmax_scale": 8**-0.5}
        assert options == {"num_gqa_groups": 2, "qkv_format": "bshd", "attn_mask_type": "causal", **softmax}

    def set_context_parallel_group(self, group: Any, ranks: list[int], stream: object, comm_type: str) -> None:
        StandIn.told = (group, ranks, comm_type)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert StandIn.state["backend_selection_requires_update"]
        StandIn.state |= {"use_flash_attention": "NVTE_FLASH_ATTN" in switched_on()}
        StandIn.state |= {"flash_attention_backend": "4.0.0b29" if "NVTE_FLASH_ATTN_V4" in switched_on() else "2.8.3"}
        StandIn.state |= {"use_fused_attention": "NVTE_FUSED_ATTN" in switched_on()}
        mixed = Reduced.apply(q) * (k.sum() + v.sum())  # pyright: ignore[reportOperatorIssue]
        return mixed.flatten(2)


class OfAllRanks(torch.autograd.Function):
    """[t,H,D] of this rank -> [P,t,H,D] of all. Each rank's gradient is the sum of what all have of it."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


def rank_order(cu_seqlens: list[int], cp_size: int) -> torch.Tensor:
    """The tokens that each rank holds by the library's rule, [P,t]: chunks r and 2P-1-r of each document."""
    held = []
    for rank in range(cp_size):
        mine = []
        for start, stop in itertools.pairwise(cu_seqlens):
            chunks = torch.arange(start, stop).view(2 * cp_size, -1)  # fails unless 2P divides the document
            mine += [chunks[rank], chunks[2 * cp_size - 1 - rank]]
        held.append(torch.cat(mine))
    return torch.stack(held)


class PackedStandIn(StandIn):
    """The same for qkv_format="thd". It asserts what `DotProductAttention.forward` asserts, and computes each document
    between two of `cu_seqlens` by itself, in fp64 or as the inputs are, by our math kernel."""

    def __init__(self, num_attention_heads: int, kv_channels: int, **options: Any) -> None:
        assert options["qkv_format"] == "thd"
        assert options["attn_mask_type"] == "padding_causal"
        self.sizes, self.scale = (num_attention_heads, options["num_gqa_groups"], kv_channels), options["softmax_scale"]

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        pad_between_seqs: bool,
    ) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim = self.sizes
        assert [x.shape[1:] for x in (q, k, v)] == [(num_heads, head_dim), *[(num_kv_heads, head_dim)] * 2]
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert max_seqlen_q == max_seqlen_kv == int(cu_seqlens_q.diff().max())
        assert not pad_between_seqs
        StandIn.state |= {"use_flash_attention": "NVTE_FLASH_ATTN" in switched_on()}
        StandIn.state |= {"flash_attention_backend": "4.0.0b29" if "NVTE_FLASH_ATTN_V4" in switched_on() else "2.8.3"}
        StandIn.state |= {"use_fused_attention": "NVTE_FUSED_ATTN" in switched_on()}
        _, ranks, _ = StandIn.told
        assert ranks == list(range(dist.get_world_size()))
        ends = cu_seqlens_q.tolist()
        order = rank_order(ends, len(ranks))
        assert order.shape[1] == len(q)  # cu_seqlens are those of all ranks' tokens
        back = order.flatten().argsort()
        whole = [OfAllRanks.apply(x).flatten(0, 1)[back] for x in (q, k, v)]  # pyright: ignore
        attend = differentiable(kernels.get("math"), causal=True, scale=self.scale)
        alone = [attend(*(x[None, start:stop] for x in whole)) for start, stop in itertools.pairwise(ends)]
        return torch.cat(alone, dim=1)[0, order[dist.get_rank()]].flatten(1)


def install_stand_in(attention: type = StandIn) -> None:
    StandIn.state = {"backend_selection_requires_update": False}
    contents = {
        "": {},
        ".pytorch": {"DotProductAttention": attention},
        ".pytorch.attention": {},
        ".pytorch.attention.dot_product_attention": {"_attention_backends": StandIn.state},
    }
    for path, names in contents.items():
        module = ModuleType(NAME + path)
        vars(module).update(names)
        sys.modules[NAME + path] = module
    patch.object(torch.cuda, "Stream", object).start()  # there is none on CPU


def ranks_of(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def check_what_it_is_told(rank: int) -> None:
    install_stand_in()
    os.environ["NVTE_FLASH_ATTN"] = "7"
    shape = AttentionShape(1, 16, 4, 2, 8, True, "float32")
    pair, across = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    expected = {"p2p": [0, 1, 2, 3], "all_gather": [0, 1, 2, 3], "a2a": [0, 1, 2, 3], "a2a+p2p": [pair, across]}
    for method, kernel in itertools.product((P2P, GATHER, A2A, HIERARCHICAL), SWITCHES):
        q, k, v = (torch.ones(1, 4, heads, 8, requires_grad=True) for heads in (4, 2, 2))
        mesh = mesh_of(methods.get(NAME).layout(method, 4))
        with methods.get(NAME).open(method, kernels.get(kernel), shape, mesh) as attention, Ledger() as book:
            assert switched_on() == SWITCHES[kernel]
            out = attention(q, k, v)
            assert out.shape == q.shape
            with ledger.phase("backward"):
                out.sum().backward()
        group, ranks, comm_type = StandIn.told
        groups = [ranks_of(g) for g in group] if isinstance(group, list) else ranks_of(group)
        assert (groups, ranks, comm_type) == (expected[comm_type], [0, 1, 2, 3], method.variant)
        assert {key: calls for key, (calls, _) in book.counts.items()} == {
            ("forward", "all_reduce"): 1,
            ("backward", "all_reduce"): 1,
        }
    assert os.environ.pop("NVTE_FLASH_ATTN") == "7"
    assert not switched_on()
    assert StandIn.state["backend_selection_requires_update"]


def test_each_variant_gets_its_groups_and_the_environment_is_restored() -> None:
    run(4, check_what_it_is_told)


def check_packed_layout_and_lengths(rank: int, sp_size: int) -> None:
    install_stand_in(PackedStandIn)
    for (number, method), (index, documents) in itertools.product(enumerate(PACKED), enumerate(PACKS)):
        hkv = (8, 4)[(number + index) % 2]  # each method has both
        if method.variant == "a2a+p2p" and sp_size == 2:
            continue
        shape = AttentionShape(1, 144, 8, hkv, 8, True, "float64", documents)
        mesh = mesh_of(methods.get(NAME).layout(method, sp_size))
        with methods.get(NAME).open(method, kernels.get("flash_attn"), shape, mesh) as attention:
            columns = reduced_length.check_attention(
                attention, kernels.get("math"), "math", shape, mesh, here(), seed=0
            )
        assert columns["rel_error_dq"] < 1e-13
        assert set(columns["outside_difference"].values()) == {0.0}, (method, documents)
        assert min(columns["inside_difference"].values()) > 0.1


@pytest.mark.parametrize("sp_size", [2, 4])
def test_packed_tokens_lie_as_the_library_cuts_documents_and_its_lengths_are_those_of_the_pack(sp_size: int) -> None:
    run(sp_size, check_packed_layout_and_lengths, sp_size)


def check_own_packed_kernel(rank: int) -> None:
    """The kernel alone takes no documents, as aten's cuDNN, so each goes to it by itself."""
    install_stand_in(PackedStandIn)
    shape = AttentionShape(1, 144, 8, 4, 8, True, "float32", PACKS[0])
    mesh = mesh_of(methods.get(NAME).layout(PACKED[0], 2))
    alone = kernels.get("cpu_flash")  # in the place of aten's cuDNN
    assert not kernels.packs("cudnn")
    with methods.get(NAME).open(PACKED[0], kernels.get("cudnn"), shape, mesh) as attention:
        columns = reduced_length.check_attention(attention, alone, "cudnn", shape, mesh, here(), seed=0)
        assert columns["kernel_rel_error"].keys() == columns["error_budget"].keys()
        shifted = SimpleNamespace(forward=lambda q, *rest, **options: alone.forward(-q, *rest, **options))
        shifted.backward = alone.backward
        with pytest.raises(Incorrect, match="kernel cudnn on one device"):
            reduced_length.check_attention(attention, shifted, "cudnn", shape, mesh, here(), seed=0)


def test_a_kernel_that_only_the_library_runs_on_packs_is_proven_on_each_document_alone() -> None:
    run(2, check_own_packed_kernel)


def test_another_backend_than_the_one_asked_for_is_an_error() -> None:
    ran = {"use_flash_attention": True, "flash_attention_backend": "3.0.0", "use_fused_attention": False}
    for kernel in SWITCHES:
        with pytest.raises(RuntimeError, match=f"kernel={kernel} was asked for"):
            _require(kernel, ran)
    with pytest.raises(RuntimeError, match="kernel=flash_attn was asked for"):
        _require("flash_attn", ran | {"flash_attention_backend": "4.0.0b36"})
    _require("flash_attn_4", ran | {"flash_attention_backend": "4.0.0b36"})
    _require("flash_attn", ran | {"flash_attention_backend": "2.8.3"})
    _require("cudnn", ran | {"use_flash_attention": False, "use_fused_attention": True})
