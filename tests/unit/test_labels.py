"""Labels and positions of training steps: which tokens have a label, for packs and for masked prompts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.config.documents import cut, spans
from sp_bench.config.parsing import ConfigError
from sp_bench.driver.derived import derived
from sp_bench.methods import get
from sp_bench.oracle.timed_step import CutShort, shorter_lengths
from sp_bench.planning import plan
from sp_bench.training import train

from .records import record_of

PACKED = {"workload__packing": "lognormal", "workload__document_len": 64, "workload__document_sigma": 1.0}
FIXED = {"workload__packing": "fixed", "workload__document_len": 128}
STEP = {"workload": "train_step", "seq_len": 1024}
SHARES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.9999])


@given(share=SHARES, is_packed=st.booleans(), seed=st.integers(0, 5), sixteenths=st.integers(16, 80))
def test_a_label_is_the_next_token_of_the_same_document_and_the_first_share_is_masked(
    make_config, share, is_packed, seed, sixteenths
):
    seq_len, packed = 16 * sixteenths, PACKED if is_packed else {}
    config = make_config(**STEP | packed | {"seq_len": seq_len}, seed=seed, workload__masked_label_share=share)
    mask = train.is_labelled(config, seq_len, seq_len)
    assert int(mask.sum()) == config.num_labels(seq_len)
    for whole in spans(config.documents(seq_len) or (seq_len + 1,)):
        labels = mask[whole.start : whole.stop - 1].tolist()
        num_masked = int(share * len(labels))
        assert labels == [False] * num_masked + [True] * (len(labels) - num_masked)
        assert any(labels)
        assert whole.stop > seq_len or not mask[whole.stop - 1]


@given(share=SHARES, seed=st.integers(0, 5), sixteenths=st.integers(4, 80))
def test_a_loader_that_drops_the_last_label_makes_a_sequence_shorter_and_a_pack_not(
    make_config, share, seed, sixteenths
):
    seq_len = 16 * sixteenths
    step = STEP | {"seq_len": seq_len, "workload__masked_label_share": share}
    whole = make_config(**step)
    of_shorter = train.is_labelled(whole, seq_len - 1, seq_len)
    assert torch.equal(train.is_labelled(whole, seq_len, seq_len, unlabelled=1), of_shorter)
    assert int(of_shorter.sum()) == whole.num_labels(seq_len - 1)
    pack = make_config(**step | PACKED | {"workload__document_len": 32}, seed=seed)
    of_pack = train.is_labelled(pack, seq_len, seq_len)
    assert torch.equal(train.is_labelled(pack, seq_len, seq_len, unlabelled=1), of_pack)
    # a pack that is cut short may end within a document, whose last token then loses its label
    cut_short = CutShort(**vars(pack))
    dropped = train.is_labelled(cut_short, seq_len - 8, seq_len - 8, unlabelled=1)
    assert torch.equal(dropped[:-1], of_pack[: seq_len - 9])
    assert not dropped[-1]


@given(seed=st.integers(0, 5), sixteenths=st.integers(4, 80))
def test_positions_restart_in_each_document(make_config, seed, sixteenths):
    seq_len = 16 * sixteenths
    config = make_config(**STEP | PACKED | {"seq_len": seq_len, "workload__document_len": 32}, seed=seed)
    positions = train.document_positions(config, seq_len)
    starts = [whole.start for whole in spans(config.documents(seq_len))]
    assert (positions == 0).nonzero().flatten().tolist() == starts
    assert set((positions[1:] - positions[:-1])[positions[1:] > 0].tolist()) == {1}
    assert torch.equal(train.document_positions(make_config(**STEP), 50), torch.arange(50))


@given(share=SHARES, is_packed=st.booleans(), seq_len=st.integers(2, 1024))
def test_a_text_cut_short_has_the_documents_and_labels_of_the_whole_text(make_config, share, is_packed, seq_len):
    config = make_config(**STEP | (PACKED if is_packed else {}), workload__masked_label_share=share)
    short = CutShort(**vars(config))
    assert short.documents(1024) == config.documents(1024)
    assert sum(short.documents(seq_len)) == (seq_len if is_packed else 0)
    assert short.documents(seq_len)[:-1] == config.documents(1024)[: len(short.documents(seq_len)) - 1]
    whole = train.is_labelled(config, 1024, 1024)[:seq_len]
    if whole.any():
        assert torch.equal(train.is_labelled(short, seq_len, seq_len), whole)


@pytest.mark.parametrize("sp_size", [1, 2, 3])
@pytest.mark.parametrize("packed", [{}, FIXED])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_shorter_run_shares_labels_with_the_timed_step(make_config, sp_size, packed, share):
    config = make_config(
        **STEP | packed | {"seq_len": 9216},
        method="ring",
        method__layout="zigzag",
        sp_size=sp_size,
        workload__masked_label_share=share,
    )
    multiple = get("ring").layout(config.method, sp_size).multiple
    longest = max(shorter_lengths(config))
    shared = train.is_labelled(config, 9216, 9216)[:longest].sum()
    assert shared >= 0.74 * config.num_labels(9216)
    assert (9216 - longest) % multiple == 0


def test_cut_documents_end_where_the_text_does():
    assert cut((32, 16, 48), 40) == (32, 8)
    assert cut((32, 16, 48), 48) == (32, 16)
    assert cut((), 40) == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workload__masked_label_share": 1.0}, "must be 0 or more, and less than 1"),
        ({"workload__masked_label_share": -0.1}, "must be 0 or more, and less than 1"),
        ({"workload__masked_label_share": 0.5, "workload": "attention"}, "workload attention has no labels"),
        (
            {
                "workload__masked_label_share": 0.5,
                "workload__single_step": True,
                "workload__warmup_steps": 0,
                "workload__timed_steps": 1,
            },
            "compared with a short text alone",
        ),
    ],
)
def test_labels_that_cannot_be_masked_are_refused(make_config, fields, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**STEP | fields)


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (FIXED, "trains whole sequences here; use engine=fsdp2"),
        ({"workload__masked_label_share": 0.5}, "trains on all labels here; use engine=fsdp2"),
    ],
)
def test_engines_that_know_no_documents_and_no_prompts_are_unsupported(make_config, engine, asked, message):
    config = make_config(**STEP | asked, method="ulysses", kernel="math", engine=engine)
    assert message in (plan.unsupported_reason(config, None) or "")


def test_a_pack_is_not_padded(make_config):
    config = make_config(**STEP | FIXED, method="ring", method__layout="zigzag", kernel="math", sp_size=3)
    assert "seq_len=1024" in (plan.unsupported_reason(config, None) or "")


def test_a_packed_step_counts_all_its_tokens_and_visible_pairs_only(make_config):
    whole, packed, masked = (
        make_config(**STEP | more, kernel="math", workload__timed_steps=1)
        for more in ({}, FIXED, {"workload__masked_label_share": 0.5})
    )
    rows = [derived(config, 1024, record_of(config, 400.0), None) for config in (whole, packed, masked)]
    assert {row["tokens_per_s"] for row in rows} == {1024 / 0.4}
    model = whole.model
    fewer = 3 * 4 * model.num_layers * model.num_heads * model.head_dim * (1024 * 1025 // 2 - 8 * 128 * 129 // 2)
    assert rows[0]["model_flops"] - rows[1]["model_flops"] == fewer
    assert rows[2]["model_flops"] == rows[0]["model_flops"]
    assert rows[1]["num_documents"] == 8


def test_no_masked_labels_is_the_cell_of_before(make_config):
    assert plan.cell_id(make_config(**STEP, workload__masked_label_share=0.0)) == plan.cell_id(make_config(**STEP))
    assert plan.cell_id(make_config(**STEP, workload__masked_label_share=0.5)) != plan.cell_id(make_config(**STEP))
