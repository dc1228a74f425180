"""Latents (MLA) on real ranks: output, the gradients of queries, latents and both up-projections, bytes, products and
calls of the kernel; with keys and values travelling, and with latents."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from oracle import Case, on_meshes
from ranks import here, run

from sp_bench import kernels, methods
from sp_bench.attention.no_kernel import NoKernel
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import OF_METHODS
from sp_bench.costs.work import projection_flops
from sp_bench.measure import ledger
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import closed_forms
from sp_bench.oracle import reduced_length
from sp_bench.oracle.identities import check_identities
from sp_bench.oracle.timed_length import Draw, Proof
from sp_bench.workloads.step import attention_step, three_sets

SHAPE = AttentionShape(
    *(1, 0, 12, 12, 6, True, "float64"), v_head_dim=5, kv_lora_rank=7, qk_rope_head_dim=2
)  # of a key 4 elements are projected
NAMES = ("output", "dq", "dlatent", "dup")


def method_configs(sp_size: int) -> list[MethodConfig]:
    latent = [
        MethodConfig(name, layout, dkv_dtype="input", sends="latent")
        for name in ("ring", "all_gather")
        for layout in ("contiguous", "zigzag")
    ]
    usp = [MethodConfig("usp", "zigzag", None, 2, "ulysses_inner", "input")] if sp_size % 2 == 0 else []
    plain = [replace(each, sends=None) for each in latent]
    return [
        *latent,
        *plain,
        *usp,
        MethodConfig("ulysses"),
        MethodConfig("ulysses", head_chunks=2),
        MethodConfig("upipe"),
    ]


def cases(sp_size: int) -> Iterator[Case]:
    for number, method in enumerate(method_configs(sp_size)):
        shape = replace(SHAPE, seq_len=12 * sp_size, batch_size=1 + number % 2)
        if methods.get(method.name).unsupported_reason(method, "math", shape, sp_size) is None:
            yield Case(method, shape)
        if method.sends:
            yield Case(method, replace(shape, causal=False))


def reference(shape: AttentionShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, latent, up, dout of the whole sequence, and output, dq, dlatent and dup, written from the definition."""
    q, latent, up, dout = reduced_length.random_inputs(shape, torch.device("cpu"), 0)
    leaves = [x.clone().requires_grad_() for x in (q, latent, up)]
    q, latent, up = leaves
    compressed, rope = latent[:, :, 0].split([7, 2], dim=-1)
    heads = [(compressed @ up[:, h, :4], compressed @ up[:, h, 4:]) for h in range(12)]
    k = torch.stack([torch.cat([own, rope], dim=-1) for own, _ in heads], dim=1)
    v = torch.stack([value for _, value in heads], dim=1)
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=shape.causal)
    out = out.transpose(1, 2)
    return [q, latent, up, dout], [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).norm() / want.norm())


def check_all(rank: int, sp_size: int) -> None:
    for case, mesh in on_meshes(cases(sp_size)):
        inputs, want = reference(case.shape)
        layout = methods.get(case.method.name).layout(case.method, sp_size)
        positions = layout.global_positions(rank, case.shape.seq_len)
        mine = reduced_length.at_positions([x.detach() for x in inputs], positions, case.shape)
        opened = methods.open_counted(case.method, kernels.get("math"), case.shape, mesh)
        with opened as attention, ledger.Ledger() as book:
            got = attention_step(mine, attention)
        for name, found, wanted in zip(NAMES[:3], got, want, strict=False):
            assert error(found, wanted[:, positions]) < 1e-13, f"{case} on rank {rank}: {name}"
        dist.all_reduce(got[3])
        for name, part in (("keys", slice(0, 4)), ("values", slice(4, None))):
            assert error(got[3][..., part], want[3][..., part]) < 1e-13, (
                f"{case} on rank {rank}: up-projection of {name}"
            )
        sent = {key: size for key, (_, size) in book.counts.items() if size}
        assert sent == OF_METHODS[case.method.name](case.method, case.shape, sp_size), str(case)
        products = projection_flops(case.method, case.shape, sp_size, [rank], backward=True)
        assert book.work.matmul_flops == {"float64": products}, str(case)
        calls = closed_forms.kernel_calls(case.method, case.shape, sp_size, rank)
        assert (book.work.calls["forward"], book.work.calls["backward"]) == calls, str(case)
        with methods.opened(case.method, NoKernel(), case.shape, mesh) as attention, ledger.Ledger() as book:
            moved = attention_step(mine, attention)
        assert [x.shape for x in moved] == [x.shape for x in got], str(case)
        assert {key: size for key, (_, size) in book.counts.items() if size} == sent, str(case)
        assert not sum(book.work.matmul_flops.values()), f"{case}: messages alone project nothing up"


@pytest.mark.parametrize("sp_size", [1, 2, 3, 4])
def test_latents_are_as_by_definition_and_send_and_project_the_closed_form(sp_size: int) -> None:
    run(sp_size, check_all, sp_size)


def check_gate(rank: int, sp_size: int) -> None:
    """The project's own proofs pass each method; every tensor that is off by 2% in a part is refused."""
    kernel = kernels.get("math")
    for number, (case, mesh) in enumerate(on_meshes(cases(sp_size))):
        rank_of_latents = (7, 4)[number % 2]  # with 4 a latent is as wide as a key
        shape = replace(case.shape, batch_size=1, kv_lora_rank=rank_of_latents)
        if not shape.causal:
            continue
        with methods.opened(case.method, kernel, shape, mesh) as attention:
            columns = reduced_length.check_attention(attention, kernel, "math", shape, mesh, here(), seed=0)
            assert max(columns[f"rel_error_{name}"] for name in ("output", "dq", "dk", "dv")) < 1e-13, str(case)
            mine = three_sets(shape, shape.seq_len // sp_size, here(), seed=rank)[1]
            budget = {name: 10 * of_tensor for name, of_tensor in columns["error_budget"].items()}  # heads are tiny
            proof = Proof(attention.layout, shape, mesh, Draw(0, 0), budget)

            def off(which: int | None = None, part: slice = slice(None)) -> list[torch.Tensor]:
                results = attention_step(mine, attention)  # noqa: B023
                if which is not None:
                    results[which][..., part] *= 1.02
                return results

            errors, _ = proof.check_rows(off, mine)
            assert max(errors.values()) < 1e-12, str(case)
            parts = [
                (0, slice(1)),
                (1, slice(1)),
                (2, slice(rank_of_latents)),
                (2, slice(rank_of_latents, None)),
                (3, slice(4)),
                (3, slice(4, None)),
            ]
            for which, part in parts:
                name = ("output", "dq", "dk", "dv")[which]
                with pytest.raises(Incorrect, match=f"relative error of {name}"):
                    proof.check_rows(lambda: off(which, part), mine)  # noqa: B023
            assert max(check_identities(mine, off(), mesh, str(case)).values()) < 1e-13
            for which in range(4):
                with pytest.raises(Incorrect, match="does not hold"):
                    check_identities(mine, off(which), mesh, str(case))


@pytest.mark.parametrize("sp_size", [1, 2, 3])
def test_the_gate_takes_latents_and_sees_when_a_gradient_is_off(sp_size: int) -> None:
    run(sp_size, check_gate, sp_size)
