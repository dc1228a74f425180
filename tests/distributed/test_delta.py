"""The gated delta rule on real ranks: output, the gradients of q, k, v, decay and beta, bytes and calls of the kernel,
by heads and by states; and lies about states, which the proof must refuse."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from oracle import Case, on_meshes
from ranks import here, run

from sp_bench import kernels, methods
from sp_bench.attention import delta
from sp_bench.attention.no_kernel import NoKernel
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import OF_RANKS, attention_forward_flops, computed
from sp_bench.measure import ledger
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import closed_forms
from sp_bench.oracle import delta as oracle
from sp_bench.workloads.step import attention_step

SHAPE = AttentionShape(*(2, 0, 24, 12, 6, True, "float64"), v_head_dim=5, gated_delta=True)
ULYSSES = MethodConfig("ulysses")
GATHER, CHAIN = (MethodConfig("state_passing", variant=variant) for variant in ("gather", "chain"))
CONVERTED = MethodConfig("state_passing", "zigzag_by_kind", variant="gather")


def cases(sp_size: int) -> Iterator[Case]:
    """Shards of 70 tokens are one chunk of 64 and a part of one."""
    for method in (ULYSSES, GATHER, CHAIN, CONVERTED, replace(CONVERTED, variant="chain")):
        yield Case(method, replace(SHAPE, seq_len=70 * sp_size), "chunked")
    yield Case(GATHER, replace(SHAPE, seq_len=2 * sp_size, batch_size=1, num_kv_heads=24), "chunked")


def check_all(rank: int, sp_size: int) -> None:
    kernel = kernels.get("chunked")
    for case, mesh in on_meshes(cases(sp_size)):
        inputs = oracle.random_inputs(case.shape, here(), 0)
        want = oracle.results(oracle.recurrence, inputs)
        held = methods.get(case.method.name).layout(case.method, sp_size).global_positions(rank, case.shape.seq_len)
        mine, wanted = ([x[:, held] for x in xs] for xs in (inputs, want))
        opened = methods.open_counted(case.method, kernel, case.shape, mesh)
        with opened as attention, ledger.Ledger() as book:
            got = attention_step(mine, attention)
        for name, found, right, whole in zip(oracle.RESULTS, got, wanted, want, strict=True):
            assert float((found - right).norm() / whole.norm()) < 1e-12, f"{case} on rank {rank}: {name}"
        sent = {key: size for key, (_, size) in book.counts.items() if size}
        form = OF_RANKS.get(case.method.name)
        closed = form(case.method, case.shape, sp_size, rank) if form else None
        assert sent == (closed or closed_forms.traffic(case.method.name)(case.method, case.shape, sp_size)), str(case)
        assert dict(book.work.calls) == {"forward": 1, "backward": 1}, str(case)
        flops = torch.tensor(book.work.attention_flops)
        dist.all_reduce(flops)
        assert flops == 3 * attention_forward_flops(computed(case.method, case.shape)), str(case)
        with methods.opened(case.method, NoKernel(), case.shape, mesh) as attention, ledger.Ledger() as book:
            moved = attention_step(mine, attention)
        assert [x.shape for x in moved] == [x.shape for x in got], str(case)
        assert {key: size for key, (_, size) in book.counts.items() if size} == sent, str(case)


@pytest.mark.parametrize("sp_size", [1, 2, 3, 4])
def test_results_are_those_of_the_recurrence_and_bytes_those_of_the_closed_form(sp_size: int) -> None:
    run(sp_size, check_all, sp_size)


def prove(case: Case, mesh: Any) -> dict[str, Any]:
    kernel: Any = kernels.get(case.kernel)
    with methods.opened(case.method, kernel, case.shape, mesh) as attention:
        return oracle.check_attention(attention, kernel, case.kernel, case.shape, mesh, here(), 0)


def _not_passed(rule: delta.Rule, transport: Any, variant: str) -> delta.Attend:
    return lambda *read: rule(*read, None)[0]


def _without_decay(rule: delta.Rule, transport: Any, variant: str) -> delta.Attend:
    def forgetful(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        out, _ = rule(q, k, v, g, beta, state)
        return out, rule(q, k, v, torch.zeros_like(g), beta, state)[1]

    return HONEST(forgetful, transport, variant)


def _of_another_rank(rule: delta.Rule, transport: Any, variant: str) -> delta.Attend:
    shifted = SimpleNamespace(
        all_gather=transport.all_gather,
        reduce_scatter=transport.reduce_scatter,
        group=SimpleNamespace(rank=lambda: max(transport.group.rank() - 1, 0), size=transport.group.size),
    )
    return HONEST(rule, cast(Any, shifted), "gather")


def _without_transition(rule: delta.Rule, transport: Any, variant: str) -> delta.Attend:
    """The state after a rank's tokens is its own alone: what came before is forgotten."""

    def forgetful(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        out, final = rule(q, k, v, g, beta, state)
        value_dim = v.shape[-1] - k.shape[-1]
        return out, torch.cat([final[..., :value_dim], torch.zeros_like(final[..., value_dim:])], dim=-1)

    return HONEST(forgetful, transport, variant)


HONEST = delta.by_states
LIES = (_not_passed, _without_decay, _of_another_rank, _without_transition)


def check_lies(rank: int, sp_size: int) -> None:
    ulysses, gather, chain, converted, *_ = on_meshes(cases(sp_size))
    for dtype in ("float64", "float32", "bfloat16"):
        for case, mesh in (ulysses, gather, chain, converted):
            columns = prove(replace(case, shape=replace(case.shape, dtype=dtype)), mesh)
            assert columns.keys() >= {f"rel_error_{name}" for name in oracle.RESULTS}, str(case)
    for lie in LIES:
        delta.by_states = lie
        for dtype in ("float32", "bfloat16"):
            case, mesh = gather
            with pytest.raises(Incorrect, match=f"method on {sp_size} ranks: relative error of output"):
                prove(replace(case, shape=replace(case.shape, dtype=dtype)), mesh)
    delta.by_states = HONEST


def test_the_proof_takes_each_method_and_refuses_states_that_are_wrong() -> None:
    run(3, check_lies, 3)
