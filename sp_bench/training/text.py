"""Real text without a download: the bytes of the Python standard library's source files.

A token t that is not a label for the token before it stands in a text as ~t = -1 - t. So each sequence brings its own
labels, and sequences may have different numbers of them.
"""

import itertools
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sp_bench.training.cross_entropy import IGNORED

# Share of the tokens that stay labels in `unequally_labelled`, from the first token of all sequences to the last.
KEPT = (0.25, 1.0)
# Folders that are not the standard library's, or that some distributions of Python leave out.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests"}


@cache
def source_files() -> tuple[Path, ...]:
    """The .py files of the standard library, sorted by path.

    Raises:
        FileNotFoundError: the interpreter is zipped or frozen and has no source files.
    """
    root, files = Path(sysconfig.get_path("stdlib")), []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _SKIPPED  # os.walk does not enter them: site-packages can hold 100,000 files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise FileNotFoundError(f"no .py sources under {root}; use an interpreter with an unpacked standard library")
    return tuple(sorted(files))


def _bytes_from(start: int) -> Iterator[bytes]:
    """The text from byte `start` on, file by file. After the last file it begins again with the first."""
    for path in itertools.cycle(source_files()):
        size = path.stat().st_size
        if start < size:
            yield path.read_bytes()[start:]
        start = max(start - size, 0)


def sequences(first: int, num_sequences: int, seq_len: int) -> Tensor:
    """Sequences `first`, first+1, ... of the text as token ids 0..255: [num_sequences, seq_len + 1], int64.

    Row i holds bytes (first+i) * seq_len up to and including (first+i+1) * seq_len. So each of its seq_len inputs has a
    label, and its last token is also the first token of the next row.
    """
    needed = num_sequences * seq_len + 1
    text = bytearray()
    for piece in _bytes_from(first * seq_len):
        text += piece[: needed - len(text)]
        if len(text) == needed:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long().unfold(0, seq_len + 1, seq_len)


def unequally_labelled(sequences: Tensor, seed: int) -> Tensor:
    """`sequences` [n,S+1] with some labels taken away at random. Early sequences, and in them early tokens, keep the
    fewest labels, so that hardly two micro-batches or ranks have equally many."""
    labels = sequences[:, 1:]
    kept = torch.linspace(*KEPT, labels.numel()).view_as(labels)
    drawn = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed))
    return torch.cat((sequences[:, :1], torch.where(drawn < kept, labels, ~labels)), dim=1)


def tokens_of(text: Tensor) -> Tensor:
    """The tokens of a text, whether or not they are labels."""
    return torch.where(text < 0, ~text, text)


def labels_of(text: Tensor) -> Tensor:
    """What a model has to predict at each place of a text: its token, or IGNORED."""
    return text.masked_fill(text < 0, IGNORED)
