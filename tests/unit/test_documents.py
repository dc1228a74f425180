"""Packed documents: their lengths, what a config refuses, and what follows from them by closed form."""

import os
import re
from dataclasses import replace

import pytest

from sp_bench.attention.layouts import SequenceLayout, causal_pairs_of_ranks, num_blocks
from sp_bench.config.documents import MAX_DOCUMENTS, causal_pairs, documents, from_file, longest_pack, spans
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import score_pairs
from sp_bench.methods import refusals
from sp_bench.planning import plan

FIXED = {"workload__packing": "fixed", "workload__document_len": 128, "seq_len": 1024}


@pytest.mark.parametrize("seq_len", [32, 48, 50, 1024, 131_072])
@pytest.mark.parametrize(("packing", "sigma"), [("fixed", 0.0), ("lognormal", 1.0)])
def test_documents_fill_the_pack_and_are_rounded_to_16(packing, sigma, seq_len):
    for seed in range(5):
        lengths = documents(packing, seq_len, max(seq_len / 32, 1), sigma, seed)
        assert sum(lengths) == seq_len
        assert len(lengths) >= 2
        assert all(length % 16 == 0 for length in lengths[:-1])
        assert min(lengths) >= 16
        assert [position for whole in spans(lengths) for position in whole] == list(range(seq_len))


@pytest.mark.parametrize(
    ("packing", "document_len", "sigma"), [("fixed", 100, 0.0), ("lognormal", 64, 1.0), ("lognormal", 16, 3.0)]
)
def test_a_pack_longer_than_the_longest_has_too_many_documents(packing, document_len, sigma):
    for seed in range(3):
        longest = longest_pack(packing, document_len, sigma, seed, 2**28)
        numbers = [len(documents(packing, longest + more, document_len, sigma, seed)) for more in (0, 16)]
        assert numbers[0] <= MAX_DOCUMENTS < numbers[1]
    assert longest_pack(packing, document_len, sigma, 0, 4096) == 4096


def test_a_seed_draws_the_same_documents_for_every_method(make_config):
    drawn = {"workload__packing": "lognormal", "workload__document_len": 64, "workload__document_sigma": 1.0}
    found = [make_config(method=m, seq_len=2048, **drawn).documents(2048) for m in ("ulysses", "ring", "single")]
    assert found[0] == found[1] == found[2]
    assert found[0] != make_config(seq_len=2048, seed=1, **drawn).documents(2048)


def test_a_short_proof_has_documents_that_are_shorter_by_as_much(make_config):
    config = make_config(
        seq_len=131_072, **{k: v for k, v in FIXED.items() if k != "seq_len"} | {"workload__document_len": 4096}
    )
    assert config.documents(131_072) == (4096,) * 32
    assert config.documents(512) == (16,) * 32


LIST = {"workload__packing": "file", "workload__document_lens": "100,312,16,512,384,7", "seq_len": 1024}


def test_a_list_packs_its_lengths_in_their_order_and_is_cut_where_the_pack_ends(make_config):
    config = make_config(**LIST)
    assert config.documents(1024) == (96, 320, 16, 512, 80)
    assert config.documents(64) == (16, 16, 16, 16)
    assert sum(config.documents(512)) == 512
    others = [make_config(**LIST | {"workload__document_lens": lens}) for lens in ("100,312,16,512,384", "512,512")]
    assert len({plan.cell_id(each) for each in (config, *others)}) == 3


def test_a_document_of_a_list_may_take_all_of_the_pack_but_16_tokens(make_config):
    config = make_config(**LIST | {"workload__document_lens": "1004,16"})
    assert config.documents(1024) == (1008, 16)


def test_a_document_is_no_longer_than_half_however_widely_lengths_are_drawn():
    lengths = documents("lognormal", 65_536, 2048, 600.0, 1)  # the exponential of what is drawn overflows
    assert sum(lengths) == 65_536
    assert max(lengths) == 32_768


@pytest.mark.parametrize(
    "text",
    [
        "16\n32 64,48\n",
        "[16, 32, 64, 48]",
        "- 16 # short\n- 32\n- 64\n- 48\n",
        "---\n-\n  16\n- '32'\n- 64\n- 48\n",
        '"tokens"\n"16"\n"32"\n"64"\n"48"\n',
    ],
)
def test_a_file_of_lengths_is_a_yaml_list_or_plain_numbers(tmp_path, text):
    (tmp_path / "lens").write_text(text)
    assert from_file(tmp_path / "lens") == (16, 32, 64, 48)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no lengths"),
        ("[]", "has no lengths"),
        ("16 many", "length 2 is 'many'; give whole numbers from 1 on"),
        ("[16, -4]", "length 2 is '-4'"),
        ("[16, [4]]", "length 2 is '\\[4\\]'"),
        ("[16, true]", "length 2 is 'true'"),
        ("16\n" * 1025, "has 1025 lengths, and a pack at most 1024"),
        ("1" * 2**21, "has 2,097,152 bytes"),
        ("\udcff", "cannot be read"),
    ],
)
def test_a_file_that_is_no_list_of_lengths_is_refused(tmp_path, text, message):
    (tmp_path / "lens").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        from_file(tmp_path / "lens")


def test_a_pipe_is_no_list_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lens")
    with pytest.raises(ConfigError, match="lens cannot be read: not a file"):
        from_file(tmp_path / "lens")


def test_aliases_of_yaml_are_words_and_are_not_written_out(tmp_path):
    bomb = "\n".join(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 16}]" for i in range(60))
    (tmp_path / "lens").write_text(bomb)
    with pytest.raises(ConfigError, match="length 1 is '&a0'"):
        from_file(tmp_path / "lens")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="gone cannot be read"):
        from_file(tmp_path / "gone")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workload__document_lens": None}, "workload.packing=file needs workload.document_lens"),
        ({"workload__document_len": 16}, "workload.packing=file has no workload.document_len, "),
        ({"workload__packing": "none"}, "use null, or workload.packing=file"),
        ({"workload__document_lens": "512,x"}, "length 2 is 'x'"),
        ({"workload__document_lens": "512,256"}, "2 documents, rounded to 16 tokens, have 768, less than seq_len=1024"),
        ({"workload__document_lens": "16,1024"}, "1024 tokens leaves less than 16 of seq_len=1024 to others"),
    ],
)
def test_a_list_that_makes_no_pack_is_refused_with_its_numbers(make_config, fields, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**LIST | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workload__document_len": None}, "workload.packing=fixed needs workload.document_len"),
        ({"workload__document_sigma": 1.0}, "workload.packing=fixed has no workload.document_sigma"),
        ({"workload__packing": "none"}, "workload.packing=none has no workload.document_len"),
        ({"workload__causal": False}, "causal mask"),
        ({"workload__launch": "cuda_graph"}, "not recorded as a CUDA graph"),
        ({"batch_size": 2}, "use batch_size=1"),
        ({"seq_len": 1000}, "a multiple of 16"),
        ({"workload__document_len": 768}, "more than half of seq_len=1024"),
        ({"seq_len": 2**20, "workload__document_len": 16}, "65536 documents of seq_len=1048576, more than 1024"),
    ],
)
def test_a_pack_that_cannot_be_is_refused_with_its_numbers(make_config, fields, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**FIXED | fields)


def test_what_computes_no_attention_refuses_packs(make_config):
    with pytest.raises(ConfigError, match="collective computes no attention"):
        make_config(workload="collective", **FIXED)


def test_a_method_or_a_kernel_without_packs_is_unsupported_and_says_what_works(make_config):
    config = make_config(method="double_ring", kernel="math", sp_size=4, **FIXED)
    reason = plan.unsupported_reason(config, None) or ""
    assert "does not know the blocks of documents; use method=single, ulysses" in reason
    config = make_config(method="ulysses", kernel="sdpa_flash", **FIXED)
    assert "sdpa_flash takes no packed documents; use kernel=math" in (plan.unsupported_reason(config, None) or "")
    striped = AttentionShape(1, 64, 4, 4, 8, True, "float32", (32, 32))
    lacking = {
        "ring_flash_attn": "use method.layout=document_zigzag",
        "transformer_engine": "use method.layout=document_zigzag",
        "torch_context_parallel": "scaled_dot_product_attention",
        "yunchang": "cu_seqlens",
    }
    for name, what in lacking.items():
        assert what in (refusals.packing_reason(MethodConfig(name), striped) or "")


def test_only_visible_pairs_count():
    whole = AttentionShape(1, 96, 4, 4, 8, True, "float32")
    assert score_pairs(replace(whole, documents=(32, 64))) == 32 * 33 // 2 + 64 * 65 // 2
    assert score_pairs(whole) == 96 * 97 // 2


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_ranks_together_compute_each_visible_pair_once(kind, degree):
    lengths = (48, 16, 128, 96)
    pairs = causal_pairs_of_ranks(SequenceLayout(kind, degree), lengths)
    assert len(pairs) == degree
    assert sum(pairs) == causal_pairs(lengths)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_document_zigzag_cuts_each_document_into_equal_work_for_all_ranks(degree):
    lengths = (48, 16, 128, 96)
    layout = SequenceLayout("document_zigzag", degree, documents=lengths)
    held = [layout.global_positions(rank, sum(lengths)) for rank in range(degree)]
    assert sorted(at for mine in held for at in mine) == list(range(sum(lengths)))
    assert all(sum(at in whole for at in mine) == len(whole) // degree for mine in held for whole in spans(lengths))
    assert causal_pairs_of_ranks(layout, lengths) == [causal_pairs(lengths) // degree] * degree
    libraries = replace(layout, by_document=True)
    for rank, mine in enumerate(held):
        theirs = libraries.global_positions(rank, sum(lengths))
        assert sorted(theirs) == sorted(mine)
        assert theirs == sorted(theirs)  # so the chunks of a document are neighbours


def test_attention_pads_each_document_that_is_cut_over_ranks_which_do_not_divide_it(make_config):
    config = make_config(method="ring", method__layout="document_zigzag", kernel="math", sp_size=3, **FIXED)
    shape = config.attention_shape(config.seq_len)
    assert config.documents(config.seq_len) == (128,) * 8
    assert (shape.documents, shape.seq_len) == ((132,) * 8, 8 * 132)
    assert plan.unsupported_reason(config, None) is None
    assert plan.resolve(config).padded_seq_len == 8 * 132
    whole = make_config(method="ring", method__layout="document_zigzag", kernel="math", sp_size=2, **FIXED)
    assert whole.attention_shape(whole.seq_len).documents == (128,) * 8


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("documents", [(16,), (48, 16, 128, 96), (16,) * 100])
def test_document_zigzag_calls_the_kernel_twice_for_each_shard_however_many_documents_there_are(degree, documents):
    shape = AttentionShape(1, sum(documents), 2, 2, 8, True, "float32", documents=documents)
    of_ranks = [num_blocks("document_zigzag", rank, degree, shape) for rank in range(degree)]
    assert of_ranks == [(2, 2 * degree)] * degree


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"method": "ring", "sp_size": 3, "seq_len": 1152, "workload": "train_step"},
            "sp_size=3: .* into 6 equal parts, .* training pads none of them; use sp_size in {1, 2, 4, 8}",
        ),
        ({"method": "all_gather"}, "use method=ring, ring_flash_attn"),
        ({"method": "ring", "workload__packing": "none", "workload__document_len": None}, "use method.layout=zigzag"),
    ],
)
def test_document_zigzag_is_refused_where_it_cannot_be(make_config, fields, message):
    config = make_config(kernel="math", **FIXED | {"method__layout": "document_zigzag"} | fields)
    assert re.search(message, plan.unsupported_reason(config, None) or "")
