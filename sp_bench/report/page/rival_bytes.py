"""What libraries send beside the closed form of their pattern, and why; part of the section on other libraries."""

from collections.abc import Sequence

from sp_bench.costs import patterns
from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING, counted, in_bytes, whole
from sp_bench.report.page.parts import Line, Table, Words, listing, ref, say
from sp_bench.report.pattern_bytes import PatternBytes, degrees, pattern_bytes

METHODS_DOC = "docs/METHODS.md"
NAME = "Bytes against the pattern"
HEAD = (
    *("theirs", "sp_size", "seq_len (tokens)", "pattern", "closed form", "counted", "counted / closed form"),
    *("dK/dV travel in", "why", "more in"),
)
CAPTION = (
    "Attention bytes that a rank sends off-rank in one step. Closed form: what our method of the same kind sends with "
    "its default options at the same shape, sp_size and degrees; counted: what the library's collectives held. A "
    "library's own prediction, under Communication, has these differences."
)
EQUAL = "the same bytes"


def tables(theirs: Sequence[Cell]) -> tuple[Table, ...]:
    """One a setting."""
    lines: dict[str, list[Line]] = {}
    for cell in theirs:
        if (known := pattern_bytes(cell)) is not None:
            lines.setdefault(cell.setting, []).append(_line(cell, known))
    words = (0, 3, 7, 8, 9)
    return tuple(Table(NAME, CAPTION, HEAD, tuple(each), words, setting=setting) for setting, each in lines.items())


def words(theirs: Sequence[Cell]) -> tuple[Words, ...]:
    """How many send other bytes than their pattern's, and of each library the one that is furthest above."""
    known = [(cell, found) for cell in theirs if (found := pattern_bytes(cell)) is not None]
    if not known:
        return ()
    other = [(cell, found) for cell, found in known if not found.same]
    quantity = ref(counted(len(known), "cell"), (cell for cell, _ in known))
    if not other:
        return (say("In ", quantity, " of libraries the bytes are those of the closed form of the pattern."),)
    most: dict[str, tuple[Cell, PatternBytes]] = {}
    for cell, found in other:
        if cell.series not in most or found.ratio > most[cell.series][1].ratio:
            most[cell.series] = (cell, found)
    some = ref(f"{len(other)}", (cell for cell, _ in other))
    begin = say(
        "Of ", quantity, " of libraries ", some, " sent other bytes than the closed form of the pattern, up to: "
    )
    told = listing([_most(*each) for each in most.values()])
    return (say(begin, told, f". Why is below, and in {METHODS_DOC}."),)


def _most(cell: Cell, found: PatternBytes) -> Words:
    return say(f"{cell.series} ", ref(f"{_ratio(found)}x", cell), f" those of {found.pattern}")


def _ratio(found: PatternBytes) -> str:
    """With as many digits as show that it is not 1."""
    digits = next((d for d in (3, 4, 5, 6) if found.same or round(found.ratio, d) != 1), 6)
    return f"{found.ratio:.{digits}f}"


def _line(cell: Cell, found: PatternBytes) -> Line:
    asked, split = cell.asked, degrees(cell)
    travelling = patterns.dkv_dtype(str(asked["method"]), asked["variant"], split.ring) if split else None
    why = "; ".join(f"{reason}: {_more(size)}" for reason, size in found.reasons.items())
    texts = (
        *(ref(cell.series, cell), whole(asked["sp_size"]), whole(asked["seq_len"]), _pattern(cell, found)),
        *(in_bytes(found.closed_form), ref(in_bytes(found.counted), cell), ref(_ratio(found), cell)),
        *(asked["dkv_dtype"] or travelling or MISSING, why or EQUAL, f"{METHODS_DOC}#{asked['method']}"),
    )
    return Line(texts, (cell,))


def _pattern(cell: Cell, found: PatternBytes) -> str:
    split = degrees(cell)
    return f"usp {split.ulysses} x {split.ring}" if split and found.pattern == "usp" else found.pattern


def _more(size: float) -> str:
    return f"{'-' if size < 0 else '+'}{in_bytes(abs(size))}"
