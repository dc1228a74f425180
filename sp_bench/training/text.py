"""Real text without a download: the interpreter's own standard-library sources, as bytes."""

import itertools
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# Not the interpreter's own, or left out by some distributions of it.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests"}


@cache
def source_files() -> tuple[Path, ...]:
    """The standard library's .py files, sorted by their path inside it.

    Raises:
        FileNotFoundError: this interpreter has no standard-library sources (a zipped or frozen one).
    """
    root, files = Path(sysconfig.get_path("stdlib")), []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _SKIPPED  # not entered: site-packages can hold 100,000 files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise FileNotFoundError(f"no .py sources under {root}; use an interpreter with an unpacked standard library")
    return tuple(sorted(files))


def _bytes_from(start: int) -> Iterator[bytes]:
    """The text from byte `start` on, file by file; after the last file it begins again."""
    for path in itertools.cycle(source_files()):
        size = path.stat().st_size
        if start < size:
            yield path.read_bytes()[start:]
        start = max(start - size, 0)


def sequences(first: int, num_sequences: int, seq_len: int) -> Tensor:
    """Sequences `first`, first+1, ... of the text: [num_sequences, seq_len + 1] token ids, 0..255.

    Row i holds bytes [(first+i) * seq_len, (first+i+1) * seq_len], so its last token is the label of the one before
    and the first token of the next row: every one of the seq_len inputs has a label.
    """
    needed = num_sequences * seq_len + 1
    text = bytearray()
    for piece in _bytes_from(first * seq_len):
        text += piece[: needed - len(text)]
        if len(text) == needed:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long().unfold(0, seq_len + 1, seq_len)
