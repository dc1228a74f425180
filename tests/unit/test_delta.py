"""The gated delta rule without ranks: closed forms, its kernel, plans and what is refused."""

import re
from dataclasses import replace

import pytest
import torch

from sp_bench import hardware, kernels, methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import OF_METHODS, OF_RANKS, attention_forward_flops, computed
from sp_bench.kernels import chunked, fla
from sp_bench.methods import closed_forms, real_rank
from sp_bench.oracle import delta
from sp_bench.planning import plan

QWEN3_NEXT = AttentionShape(*(1, 131_072, 32, 16, 128, True, "bfloat16"), gated_delta=True)
ULYSSES = MethodConfig("ulysses")
GATHER, CHAIN = (MethodConfig("state_passing", variant=variant) for variant in ("gather", "chain"))
LIBRARY = MethodConfig("fla_context_parallel")
MIB = 2**20


def test_heads_grow_with_the_tokens_and_states_do_not():
    def forward(method: MethodConfig, seq_len: int = 131_072) -> float:
        shape = AttentionShape(*(1, seq_len, 32, 16, 128, True, "bfloat16"), gated_delta=True)
        sent = OF_METHODS[method.name](method, shape, 8)
        return float(sum(size for (phase, _), size in sent.items() if phase == "forward")) / MIB

    gates = 7 / 8 * 16_384 * 32 * (2 + 4) / MIB  # beta, and the decay in fp32
    assert forward(ULYSSES) == 336 + gates
    assert forward(ULYSSES, 32_768) == forward(ULYSSES) / 4
    assert forward(GATHER) == forward(GATHER, 8) == 28
    assert forward(CHAIN) == 2


def test_the_ends_of_a_chain_send_one_way():
    of_ranks = [OF_RANKS["state_passing"](CHAIN, QWEN3_NEXT, 3, rank) for rank in range(3)]
    assert [{phase for phase, _ in of_rank} for of_rank in of_ranks] == [
        {"forward"},
        {"forward", "backward"},
        {"backward"},
    ]
    assert OF_METHODS["state_passing"](CHAIN, QWEN3_NEXT, 3) == of_ranks[1]


def test_flops_are_those_of_the_recurrence_and_passing_states_has_twice_the_values():
    assert attention_forward_flops(QWEN3_NEXT) == 131_072 * 32 * 6 * 128 * 128
    assert attention_forward_flops(computed(GATHER, QWEN3_NEXT)) == 2 * attention_forward_flops(QWEN3_NEXT)
    assert computed(ULYSSES, QWEN3_NEXT) == QWEN3_NEXT


@pytest.mark.parametrize("tokens", [1, 64, 100])
def test_chunks_are_the_recurrence_and_go_on_from_a_state(tokens):
    shape = AttentionShape(*(2, tokens, 6, 2, 8, True, "float64"), v_head_dim=5, gated_delta=True)
    *read, _ = delta.random_inputs(shape, torch.device("cpu"), 0)
    out, state = chunked.attend(*read, None, scale=8**-0.5)
    torch.testing.assert_close(out, delta.recurrence(*read))
    first, second = ([x[:, part] for x in read] for part in (slice(tokens // 3), slice(tokens // 3, None)))
    if tokens // 3:
        _, between = chunked.attend(*first, None, scale=8**-0.5)
        rest, end = chunked.attend(*second, between, scale=8**-0.5)
        torch.testing.assert_close(rest, out[:, tokens // 3 :])
        torch.testing.assert_close(end, state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "train_step"}, "no decoder here has such layers; use workload=attention"),
        ({"workload__causal": False}, "workload.causal=False: model.attention=gated_delta (model=qwen3_next_linear)"),
        ({"workload__sinks": True}, "workload.sinks=True: model.attention=gated_delta"),
    ],
)
def test_what_means_nothing_is_refused(make_config, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(**{"model": "qwen3_next_linear", "kernel": "chunked"} | changes)


def test_a_plan_names_the_methods_and_kernels_that_compute_it(make_config):
    def reason(**changes: object) -> str:
        config = make_config(**{"model": "qwen3_next_linear", "kernel": "chunked", "seq_len": 4096} | changes)
        return str(plan.unsupported_reason(config, None))

    assert reason() == reason(method="state_passing") == "None"
    assert reason(kernel="math") == "kernel math does not compute the gated delta rule; use kernel=chunked, fla"
    assert "use kernel=math, cpu_flash" in reason(model="tiny")
    assert "use a model with model.attention=gated_delta" in reason(model="tiny", method="state_passing")
    assert "use method=single, ulysses, state_passing" in reason(method="upipe")
    assert "use method=single, ulysses, state_passing" in reason(method="ring")
    assert "does not convert; use method=ring" in reason(method="state_passing", method__layout="zigzag_by_kind")
    assert "needs fla-core: pip install 'sp-bench[flash-linear" in reason(method="fla_context_parallel", kernel="fla")
    assert "use sp_size in {1, 2, 4, 8, 16}, or method=state_passing" in reason(sp_size=64)
    assert reason(kernel="fla") == "kernel fla runs on CUDA only; use kernel=chunked"
    one_rank = {"world": "one_rank", "method": "state_passing", "sp_size": 4}
    assert "use method.variant=gather" in reason(**one_rank, method__variant="chain")
    config = make_config(model="qwen3_next_linear", kernel="chunked", seq_len=4096, **one_rank)
    assert (reason(**one_rank), real_rank.real_place(config)) == ("None", 3)


def test_the_library_takes_its_own_kernel_and_one_sequence():
    def reason(kernel: str = "fla", shape: AttentionShape = QWEN3_NEXT) -> str:
        with hardware.as_if_installed():
            return str(methods.get(LIBRARY.name).unsupported_reason(LIBRARY, kernel, shape, 8))

    assert reason() == "None"
    assert "use kernel=fla" in reason("chunked")
    assert "use batch_size=1, or method=state_passing" in reason(shape=replace(QWEN3_NEXT, batch_size=2))
    assert "use model.attention=gated_delta" in reason(shape=replace(QWEN3_NEXT, gated_delta=False))
    with pytest.raises(ConfigError, match="use contiguous or zigzag"):
        methods.get(LIBRARY.name).layout(replace(LIBRARY, layout="striped"), 8)


def test_the_library_gathers_in_the_backward_too_and_twice_as_much_in_zigzag_order():
    form = closed_forms.traffic(LIBRARY.name)
    contiguous, zigzag = (form(replace(LIBRARY, layout=each), QWEN3_NEXT, 8) for each in ("contiguous", "zigzag"))
    ours = OF_METHODS["state_passing"](GATHER, QWEN3_NEXT, 8)
    assert contiguous["forward", "all_gather"] == contiguous["backward", "all_gather"] == ours["forward", "all_gather"]
    assert zigzag == {key: 2 * size for key, size in contiguous.items()}


def test_converting_from_zigzag_order_sends_as_heads_do_and_more():
    """A rank in the middle of 8 keeps none of its tokens; exchanging heads keeps 1/8 of each."""
    converting = replace(GATHER, layout="zigzag_by_kind")
    sent = {rank: OF_RANKS["state_passing"](converting, QWEN3_NEXT, 8, rank) for rank in range(8)}
    heads = OF_METHODS["ulysses"](ULYSSES, QWEN3_NEXT, 8)["forward", "all_to_all"]
    assert sent[4]["forward", "send"] == sent[4]["backward", "send"] == heads * 8 / 7
    assert sent[0]["forward", "send"] == sent[4]["forward", "send"] / 2  # it keeps the first of its two chunks
    assert OF_METHODS["state_passing"](converting, QWEN3_NEXT, 8) == sent[4]


@pytest.mark.parametrize(
    ("triton", "capability", "works"),
    [("3.3.1", (9, 0), True), ("3.6.0", (9, 0), False), ("3.6.0", (8, 0), True), ("3.7.1", (9, 0), True)],
)
def test_fla_is_refused_with_a_triton_by_which_its_backward_is_wrong(monkeypatch, triton, capability, works):
    device = hardware.Gpu("a GPU", "uuid", capability=capability)
    monkeypatch.setattr(hardware, "gpus", lambda: hardware.Gpus("driver", (device,)))
    monkeypatch.setattr(hardware, "package_versions", lambda: {"fla-core": "0.6.0", "triton": triton})
    monkeypatch.setattr(fla, "_triton_reason", fla._triton_reason.__wrapped__)
    reason = fla.unsupported_reason(QWEN3_NEXT, "cuda")
    assert reason is None if works else "where its backward is wrong with triton 3.6.0: pip install" in str(reason)


def test_cells_of_softmax_keep_their_ids(make_config):
    assert plan.cell_id(make_config()) == plan.cell_id(make_config(model__attention=None))
    assert plan.cell_id(make_config(model="qwen3_next_linear", kernel="chunked")) != plan.cell_id(
        make_config(model="qwen3_next_linear", model__attention=None, kernel="chunked")
    )


def test_kernels_of_one_kind_of_attention_are_no_kernels_of_the_other():
    assert not {*kernels.NAMES} & {*kernels.OF_DELTA}
    assert {name for name in kernels.OF_DELTA if kernels.get(name).CUDA_KERNELS} == {"fla"}
