"""TransformerEngine's context parallelism: parity on GPUs where it is installed.

With a stand-in for the library: what the adapter passes to it, and what the adapter restores. The stand-in does not
compute attention, so those tests say nothing about parity.
"""

import itertools
import os
import sys
from types import ModuleType
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
from sp_bench.config.trial import AttentionShape, MethodConfig
from sp_bench.measure import ledger
from sp_bench.measure.ledger import Ledger
from sp_bench.methods.transformer_engine import _require

NAME = "transformer_engine"
P2P, GATHER, A2A = (MethodConfig(NAME, "zigzag", variant) for variant in ("p2p", "all_gather", "a2a"))
HIERARCHICAL = MethodConfig(NAME, "zigzag", "a2a+p2p", 2)


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


def install_stand_in() -> None:
    StandIn.state = {"backend_selection_requires_update": False}
    contents = {
        "": {},
        ".pytorch": {"DotProductAttention": StandIn},
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
