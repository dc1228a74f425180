"""Values of another size than keys, on real ranks, against torch's own attention: output, gradients, bytes, calls."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from oracle import NAMES, Case, global_tensors, on_meshes, run_method
from ranks import here, run
from test_ledger import ledger_of
from test_methods import cases

from sp_bench import kernels, methods
from sp_bench.costs.attention import OF_METHODS
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import closed_forms, refusals
from sp_bench.oracle import reduced_length
from sp_bench.oracle.identities import check_identities
from sp_bench.oracle.timed_length import Draw, Proof


def uneven(sp_size: int) -> Iterator[Case]:
    """Every method, layout and degree, of heads and masks every third case: values smaller than keys and larger ones,
    by turns; and windows."""
    for number, case in enumerate(cases(sp_size)):
        shape = replace(case.shape, head_dim=6, v_head_dim=(4, 10)[number % 2])
        if number % 3 == 0:
            yield replace(case, shape=shape)
        windowed = replace(shape, causal=True, window=TOKENS)
        if number % 5 == 0 and refusals.window_reason(case.method, windowed) is None:
            yield replace(case, shape=windowed)


TOKENS = 7  # of a window


def reference(case: Case) -> list[torch.Tensor]:
    shape = case.shape
    q, k, v, dout = global_tensors(shape)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ahead = torch.arange(shape.seq_len)[:, None] - torch.arange(shape.seq_len)
    mask = (ahead >= 0) & (ahead < (shape.window or shape.seq_len)) if shape.causal else None
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check_all(rank: int, sp_size: int) -> None:
    for case, mesh in on_meshes(uneven(sp_size)):
        mine, positions = run_method(case, mesh)
        for name, got, want in zip(NAMES, mine, reference(case), strict=True):
            assert got.shape == want[:, positions].shape, f"{case}: {name}"
            error = float((got - want[:, positions]).norm() / want[:, positions].norm())
            assert error < 1e-13, f"{case} values of {case.shape.v_head_dim} on rank {rank}: {name} {error}"
        book, name = ledger_of(case, mesh), case.method.name
        sent = sum(size for _, size in book.counts.values())
        of_all = OF_METHODS[name](case.method, case.shape, sp_size)
        if case.shape.window is None:
            assert {key: size for key, (_, size) in book.counts.items() if size} == of_all, str(case)
        assert sent <= sum(of_all.values()), str(case)
        calls = closed_forms.kernel_calls(case.method, case.shape, sp_size, rank)
        assert (book.work.calls["forward"], book.work.calls["backward"]) == calls, str(case)


@pytest.mark.parametrize("sp_size", [1, 2, 3, 4])
def test_values_of_another_size_are_as_in_torch_and_send_the_closed_form(sp_size: int) -> None:
    assert len([*uneven(sp_size)]) >= 30
    run(sp_size, check_all, sp_size)


def check_gate(rank: int, sp_size: int) -> None:
    """The project's own proofs pass each method, and refuse values that are off."""
    kernel, seen = kernels.get("math"), set()
    for case, mesh in on_meshes(uneven(sp_size)):
        shape = replace(case.shape, batch_size=1)
        if case.method.name in seen or shape.window is not None or not shape.causal:
            continue
        seen.add(case.method.name)
        with methods.get(case.method.name).open(case.method, kernel, shape, mesh) as attention:
            columns = reduced_length.check_attention(attention, kernel, "math", shape, mesh, here(), seed=0)
            assert max(columns[f"rel_error_{name}"] for name in NAMES) < 1e-13, str(case)
            positions = attention.layout.global_positions(rank, shape.seq_len)
            mine = [x[:, positions].clone() for x in reduced_length.random_inputs(shape, here(), 0)]
            assert [x.shape[2:] for x in mine] == [*shape.heads]
            proof = Proof(attention.layout, shape, mesh, Draw(0, 0), columns["error_budget"])

            def step() -> list[torch.Tensor]:
                return reduced_length._run_method(attention, mine)  # noqa: B023

            def off(at: int) -> list[torch.Tensor]:
                results = step()
                results[at][..., -1] *= 1.001
                return results

            errors, _ = proof.check_rows(step, mine)
            assert max(errors.values()) < 1e-13, str(case)
            for which in range(4):
                with pytest.raises(Incorrect, match=f"relative error of {NAMES[which]}"):
                    proof.check_rows(lambda: off(which), mine)  # noqa: B023
            assert max(check_identities(mine, step(), mesh, str(case)).values()) < 1e-13
            with pytest.raises(Incorrect, match="sum dv = sum dout"):
                check_identities(mine, off(3), mesh, str(case))


@pytest.mark.parametrize("sp_size", [2, 3])
def test_the_gate_takes_values_of_another_size_and_sees_when_they_are_off(sp_size: int) -> None:
    run(sp_size, check_gate, sp_size)
