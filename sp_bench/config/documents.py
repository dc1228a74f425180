"""The lengths of the documents that are packed into one sequence. Pure: the same on every rank, for every method."""

import itertools
import math
import random
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sp_bench.config.parsing import ConfigError, shown
from sp_bench.config.prose import Prose

MULTIPLE = 16  # lengths are rounded to it
MAX_DOCUMENTS = 1024  # of a pack: the proof at the timed length samples the last token of each
Packing = Literal["none", "fixed", "lognormal", "file"]
MAX_FILE_BYTES = 2**20
HEAD = r"[A-Za-z][\w .()-]*"  # the first line of a file that names its column


@cache
def documents(
    packing: Packing,
    seq_len: int,
    document_len: float,
    document_sigma: float,
    seed: int,
    listed: tuple[float, ...] = (),
) -> tuple[int, ...]:
    """Lengths in tokens, in the order of the pack; they add up to `seq_len`. Empty: no packing.

    fixed: all are `document_len` tokens long. lognormal: the median is `document_len`, and `document_sigma` is the
    standard deviation of the logarithm. file: those of `listed`, one after the other. Each is rounded to a multiple of
    16, and is at most half of the pack; one of a list is at most all of it but 16. So there are two or more. The last
    one is cut where the pack ends, or takes a rest of less than 16 tokens. Lengths of a short proof may be rounded
    down, so that a list ends before the pack: what is left is one document more.
    """
    if packing == "none":
        return ()
    longest, left, lengths = _longest_document(packing, seq_len), seq_len, []
    listed_or_drawn = (
        itertools.chain(listed, itertools.repeat(left))
        if packing == "file"
        else drawn(packing, document_len, document_sigma, seed, longest)
    )
    while left:
        length = min(rounded(next(listed_or_drawn)), longest)
        length = left if left - length < MULTIPLE else length  # no rest that is shorter than any document
        lengths.append(length)
        left -= length
    return tuple(lengths)


@cache
def longest_pack(packing: Packing, document_len: float, document_sigma: float, seed: int, most: int) -> int:
    """Tokens of the longest pack of at most MAX_DOCUMENTS documents, fixed or drawn, of those of up to `most` tokens.
    A longer pack never has fewer documents."""
    lengths = [*itertools.islice(drawn(packing, document_len, document_sigma, seed, most), MAX_DOCUMENTS)]

    def has_too_many(seq_len: int) -> bool:
        longest = _longest_document(packing, seq_len)
        return sum(min(rounded(length), longest) for length in lengths) < seq_len

    packs = range(2 * MULTIPLE, most + 1, MULTIPLE)
    return packs[bisect_left(packs, True, key=has_too_many) - 1]


def shortest_pack(document_len: float) -> int:
    """Tokens of the shortest pack of such documents: it has two."""
    return MULTIPLE * max(math.ceil(2 * document_len / MULTIPLE), 2)


def _longest_document(packing: Packing, seq_len: int) -> int:
    most = seq_len - MULTIPLE if packing == "file" else seq_len // 2
    return max(most // MULTIPLE, 1) * MULTIPLE


def drawn(packing: Packing, document_len: float, document_sigma: float, seed: int, longest: int) -> Iterator[float]:
    """Lengths before they are rounded, without an end. What is beyond twice `longest` is cut there: nothing differs."""
    if packing == "fixed":
        yield from itertools.repeat(document_len)
    draw, middle, end = random.Random(seed), math.log(document_len), math.log(2 * longest)  # exp may overflow
    while True:
        yield math.exp(min(draw.normalvariate(middle, document_sigma), end))


def rounded(length: float) -> int:
    """To the nearest multiple of 16, and at least 16."""
    return max(round(length / MULTIPLE), 1) * MULTIPLE


def from_text(text: str) -> tuple[int, ...]:
    """Lengths in tokens of a text such as 4096,512,512.

    Raises:
        ConfigError: what is no list of whole numbers from 1 on, or has more than a pack may have.
    """
    return _checked("the list of documents", text.split(","))


def from_file(path: Path, most: int | None = MAX_DOCUMENTS) -> tuple[int, ...]:
    """Lengths in tokens that a file has: whole numbers between spaces, commas and ends of lines, or a plain YAML list
    of them, below a head such as `tokens` or without one. `most`: how many it may have; None: any number.

    Raises:
        ConfigError: the file cannot be read, or as for `from_text`.
    """
    said: Prose = f"the list of documents in {shown(path)}"
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, and a device may never end
            raise ConfigError(f"{said} cannot be read: not a file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{said} has {path.stat().st_size:,} bytes; a list of a pack has far less")
        text = path.read_text("utf-8-sig")  # editors of Windows begin a file with a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{said} cannot be read: {shown(error)}") from None
    lines = re.sub(r"#.*|^---\s*$|^\s*-\s|[\"']", " ", text, flags=re.MULTILINE).strip().splitlines()
    below = " ".join(lines[1:] if len(lines) > 1 and re.fullmatch(HEAD, lines[0].strip()) else lines).strip()
    if below.startswith("[") and below.endswith("]"):
        below = below[1:-1]
    return _checked(said, below.replace(",", " ").split(), most)


def _checked(said: Prose, found: Sequence[Any], most: int | None = MAX_DOCUMENTS) -> tuple[int, ...]:
    if not found:
        raise ConfigError(f"{said} has no lengths; write those of the documents in tokens, such as 4096,512,512")
    if most is not None and len(found) > most:
        raise ConfigError(
            f"{said} has {len(found)} lengths, and a pack at most {most} documents; give those of one pack"
        )
    for place, length in enumerate(found, 1):
        plain = str(length).strip()
        if not (plain.isascii() and plain.isdigit() and 0 < len(plain) < 16 and int(plain) > 0):
            raise ConfigError(
                f"{said}: length {place} is {shown(plain, 40)!r}; give whole numbers from 1 on, in tokens"
            )
    return tuple(int(str(length)) for length in found)


def spans(lengths: Sequence[int]) -> Iterator[range]:
    """The positions of each document in the pack."""
    start = 0
    for length in lengths:
        yield range(start, start + length)
        start += length


def cut(lengths: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """Lengths of the documents of a pack that ends after `seq_len` tokens: the last of them is cut there."""
    return tuple(min(whole.stop, seq_len) - whole.start for whole in spans(lengths) if whole.start < seq_len)


def padded(lengths: Sequence[int], multiple: int) -> tuple[int, ...]:
    """The lengths, each rounded up to a multiple."""
    return tuple(-(-length // multiple) * multiple for length in lengths)


def causal_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """Visible (query, key) pairs of one head, where each token sees its own document's up to itself, and no more than
    `window` of them."""
    seeing = [(length, min(length, window or length)) for length in lengths]
    return sum(w * (w + 1) // 2 + (length - w) * w for length, w in seeing)
