"""The training text: the standard library's own bytes, cut into sequences that continue each other."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.training import text


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
