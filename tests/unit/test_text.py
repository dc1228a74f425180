"""The training text: the standard library's own bytes, cut into sequences that continue each other."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.training import text
from sp_bench.training.cross_entropy import IGNORED


def test_text_is_the_first_source_file_of_the_standard_library() -> None:
    first = text.source_files()[0].read_bytes()
    tokens = text.sequences(0, 1, 64)
    assert bytes(tokens[0].tolist()) == first[:65]


def test_source_files_are_sorted_and_belong_to_the_interpreter() -> None:
    files = text.source_files()
    assert list(files) == sorted(files)
    assert not any("site-packages" in path.parts for path in files)


@given(first=st.integers(0, 50), count=st.integers(1, 5), seq_len=st.integers(1, 300))
def test_sequences_continue_each_other_and_do_not_depend_on_how_many_are_asked_for(
    first: int, count: int, seq_len: int
) -> None:
    tokens = text.sequences(first, count, seq_len)
    assert tokens.shape == (count, seq_len + 1)
    assert tokens.min() >= 0
    assert tokens.max() <= 255
    assert torch.equal(tokens[1:, 0], tokens[:-1, -1])
    assert torch.equal(tokens[-1:], text.sequences(first + count - 1, 1, seq_len))


def test_text_begins_again_after_its_last_file() -> None:
    size = sum(path.stat().st_size for path in text.source_files())
    last = text.sequences(size // 50, 1, 50)[0]
    assert torch.equal(last[size % 50 :], text.sequences(0, 1, 50 - size % 50)[0])


@given(count=st.integers(2, 6), seq_len=st.integers(32, 200), seed=st.integers(0, 99))
def test_unequally_labelled_sequences_have_the_same_tokens_and_different_numbers_of_labels(
    count: int, seq_len: int, seed: int
) -> None:
    whole = text.sequences(0, count, seq_len)
    some = text.unequally_labelled(whole, seed)
    assert torch.equal(text.tokens_of(some), whole)
    labels = text.labels_of(some[:, 1:])
    assert torch.equal(labels[labels != IGNORED], whole[:, 1:][labels != IGNORED])
    numbers = (labels != IGNORED).sum(1)
    assert numbers.min() > 0
    assert numbers[0] < numbers[-1]
