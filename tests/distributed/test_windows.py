"""Windows against torch's own attention under a mask, on real ranks: output, all gradients, bytes and calls."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from oracle import NAMES, Case, global_tensors, on_meshes, run_method
from ranks import here, run, worlds
from test_ledger import ledger_of
from test_methods import TOKENS_A_RANK, heads, method_configs

from sp_bench import kernels, methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import OF_RANKS
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import closed_forms, refusals
from sp_bench.oracle import reduced_length
from sp_bench.oracle.identities import check_identities
from sp_bench.oracle.timed_length import Draw, Proof
from sp_bench.workloads.step import attention_step


def cases(sp_size: int) -> list[Case]:
    """Every method and layout, each with windows of a part of a chunk, of its end, of a neighbour and of all."""
    length = TOKENS_A_RANK * sp_size
    tenth = length // 10
    packs = [(3 * tenth, 4 * tenth, length - 7 * tenth), (length // 2, 1, length - length // 2 - 1)]
    windows = sorted({w for w in (2, 3, 6, 7, 12, 13, 20, 25, length - 1) if w < length})
    drawn = zip(itertools.cycle(heads(sp_size).values()), itertools.cycle((1, 2)), strict=False)
    able = [
        method
        for method in (*method_configs(sp_size), MethodConfig("ring", "zigzag_by_kind", dkv_dtype="input"))
        if refusals.window_reason(method, AttentionShape(1, length, 12, 12, 8, True, "float64", window=2)) is None
    ]
    whole = [
        Case(method, AttentionShape(batch, length, *of_heads, 8, True, "float64", window=window))
        for method in able
        for window in windows
        for of_heads, batch in [next(drawn)]
    ]
    packed = [
        Case(method, AttentionShape(1, length, *next(drawn)[0], 8, True, "float64", documents, window))
        for method in able
        for documents in packs
        for window in (2, 6, 13)
        if window < max(documents)
    ]
    return whole + packed


def usable(sp_size: int) -> Iterator[Case]:
    for case in cases(sp_size):
        module = methods.get(case.method.name)
        unsupported = module.unsupported_reason(case.method, case.kernel, case.shape, sp_size)
        if unsupported is None and refusals.packing_reason(case.method, case.shape) is None:
            yield case


def reference(shape: AttentionShape) -> list[torch.Tensor]:
    """output, dq, dk, dv of the whole sequence in fp64."""
    q, k, v, dout = global_tensors(shape)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ahead = torch.arange(shape.seq_len)[:, None] - torch.arange(shape.seq_len)
    seen, lengths = (ahead >= 0) & (ahead < shape.window), torch.tensor(shape.documents or (shape.seq_len,))
    seen &= torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check_all(rank: int, sp_size: int) -> None:
    for case, mesh in on_meshes(usable(sp_size)):
        mine, positions = run_method(case, mesh)
        for name, got, want in zip(NAMES, mine, reference(case.shape), strict=True):
            error = float((got.double().cpu() - want[:, positions]).norm() / want[:, positions].norm())
            of_case = f"{case} window {case.shape.window} of documents {case.shape.documents}"
            assert error < 1e-13, f"{of_case} on rank {rank}: {name} {error}"
        book, name = ledger_of(case, mesh), case.method.name
        sent = {key: size for key, (_, size) in book.counts.items() if size}
        of_all = closed_forms.traffic(name)(case.method, case.shape, sp_size)
        expected = OF_RANKS[name](case.method, case.shape, sp_size, rank) if name in OF_RANKS else of_all
        assert sent == expected, str(case)
        assert sum(sent.values()) <= sum(of_all.values()), str(case)
        calls = closed_forms.kernel_calls(case.method, case.shape, sp_size, rank)
        assert (book.work.calls["forward"], book.work.calls["backward"]) == calls, str(case)


@pytest.mark.parametrize(("backend", "sp_size"), worlds(gloo=(1, 2, 3, 4), nccl=(2, 3, 4, 8)))
def test_windows_are_as_under_a_mask_and_send_the_closed_form(backend: str, sp_size: int) -> None:
    assert len([*usable(sp_size)]) >= 50
    run(sp_size, check_all, sp_size, backend=backend)


def check_sinks(rank: int, sp_size: int) -> None:
    """The gate's own reference is the definition: a further score of each query, without a value. Each method without a
    window and with one, and with one in a pack."""
    kernel, seen = kernels.get("math"), set()
    for case, mesh in on_meshes(usable(sp_size)):
        full = case.shape.window == 2  # one of the windows of each method stands for none
        full &= not case.shape.documents
        if case.shape.window not in (2, 7) or (case.method, full, bool(case.shape.documents)) in seen:
            continue
        seen.add((case.method, full, bool(case.shape.documents)))
        window = min(7, max(case.shape.documents, default=8) - 1)
        shape = replace(case.shape, window=None if full else window, sinks=True)
        with methods.get(case.method.name).open(case.method, kernel, shape, mesh) as attention:
            columns = reduced_length.check_attention(attention, kernel, "math", shape, mesh, here(), seed=0)
            assert max(columns[f"rel_error_{name}"] for name in (*NAMES, "dsinks")) < 1e-13, str(case)
            sinks = reduced_length.random_sinks(shape, here(), 0)
            positions = attention.layout.global_positions(rank, shape.seq_len)
            mine = [x[:, positions].clone() for x in reduced_length.random_inputs(shape, here(), 0)]
            at = (attention.layout, shape, mesh, Draw(0, 0), columns["error_budget"])

            def step() -> list[torch.Tensor]:
                return attention_step(mine, attention, sinks=sinks)  # noqa: B023

            errors, _ = Proof(*at, sinks).check_rows(step, mine)
            assert max(errors.values()) < 1e-13, str(case)
            with pytest.raises(Incorrect, match="relative error of output"):
                Proof(*at).check_rows(step, mine)
            assert check_identities(mine, step(), mesh, str(case), sinks=True).keys() == {"q_dq", "v_dv"}


@pytest.mark.parametrize("sp_size", [1, 2, 3])
def test_sinks_are_a_score_without_a_value_and_counted_once(sp_size: int) -> None:
    run(sp_size, check_sinks, sp_size)


def check_gate(rank: int, sp_size: int) -> None:
    """The project's own proofs, of each method at one window: at a reduced length, where a key is perturbed, and of
    sampled rows at the timed length. A window that is one token off meets neither."""
    kernel = kernels.get("math")
    chosen = {
        (case.method.name, case.method.layout, len(case.shape.documents)): case
        for case in usable(sp_size)
        if case.shape.window == 13
    }
    for case, mesh in on_meshes(replace(case, shape=replace(case.shape, batch_size=1)) for case in chosen.values()):
        with methods.get(case.method.name).open(case.method, kernel, case.shape, mesh) as attention:
            columns = reduced_length.check_attention(attention, kernel, "math", case.shape, mesh, here(), seed=0)
            assert columns["rel_error_dq"] < 1e-13
            assert set(columns["outside_difference"].values()) == {0.0}, str(case)
            assert min(columns["inside_difference"].values()) > 1e-3, (str(case), columns["inside_difference"])
            positions = attention.layout.global_positions(rank, case.shape.seq_len)
            mine = [x[:, positions].clone() for x in reduced_length.random_inputs(case.shape, here(), 0)]

            def step() -> list[torch.Tensor]:
                return reduced_length._run_method(attention, mine)  # noqa: B023

            at = (mesh, Draw(0, 0), columns["error_budget"])
            errors, _ = Proof(attention.layout, case.shape, *at).check_rows(step, mine)
            assert max(errors.values()) < 1e-13, str(case)
            wider = replace(case.shape, window=14)
            with pytest.raises(Incorrect, match="relative error"):
                Proof(attention.layout, wider, *at).check_rows(step, mine)
            inputs = [x[:, positions] for x in reduced_length.random_inputs(case.shape, here(), 0)]
            got, narrower = reduced_length._run_method(attention, inputs), replace(case.shape, window=12)
            with pytest.raises(Incorrect, match=r"perturbed key: output of tokens outside the window changes by"):
                reduced_length.check_window(attention, inputs, positions, narrower, got, mesh)
            with pytest.raises(Incorrect, match=r"perturbed key: output at the window's edge changes by 0"):
                reduced_length.check_window(attention, inputs, positions, wider, got, mesh)


@pytest.mark.parametrize("sp_size", [2, 3])
def test_the_gate_passes_a_window_and_no_other(sp_size: int) -> None:
    run(sp_size, check_gate, sp_size)
