"""The section on other libraries: each against our method of the same kind, in the same setting, length and ranks."""

from collections.abc import Sequence

from sp_bench.report.cells import Cell
from sp_bench.report.formats import number, whole
from sp_bench.report.page import rival_bytes
from sp_bench.report.page.parts import Line, Section, Table, Words, median_ms, processors, ref, say, with_kernel
from sp_bench.report.ratios import behind, paired_ratio, ratio_of_medians
from sp_bench.report.rivals import ANY, FASTEST, SAME, counterparts, libraries

IN_WORDS = {SAME: "ours with the same kernel", FASTEST: "our fastest of its kind", ANY: "our fastest"}
HEAD = (
    *("theirs", "sp_size", "seq_len (tokens)", "kernel", "step (ms)", "compared with", "ours", "our kernel"),
    *("our step (ms)", "theirs / ours", "evidence"),
)
BASIS = "seq_len and sp_size are fixed in each ratio, so that none is about scaling; the baseline is our method."
CAPTION = (
    "Step time of a library over ours in the same setting, length and number of ranks: above 1, ours is faster. Same "
    "kernel and fastest kernel: our method of the same kind, layout and degrees (of Ulysses, any layout: every rank "
    f"computes whole sequences), of several the one with the smallest median; {ANY}: the fastest of all. Intervals are "
    "of the paired ratio."
)


def section(cells: Sequence[Cell]) -> Section | None:
    pairs = [(their, what, our) for their in libraries(cells) for what, our in counterparts(their, cells)]
    if not pairs:
        return None
    settings = list(dict.fromkeys(their.setting for their, _, _ in pairs))
    tables = tuple(
        Table(s, CAPTION, HEAD, tuple(_line(*pair) for pair in pairs if pair[0].setting == s), (0, 3, 5, 6, 7, 10))
        for s in settings
    )
    points = tuple(_words(*each) for each in _largest_first(cells))
    told = rival_bytes.words(libraries(cells))
    tables += rival_bytes.tables(libraries(cells))
    return Section("rivals", "Against other libraries", BASIS, words=told, points=points, tables=tables)


def summary(cells: Sequence[Cell]) -> list[Words]:
    """The sentences of `section` on the most ranks and tokens of each setting and library."""
    first: dict[tuple[str, str], Words] = {}
    for their, ours in _largest_first(cells):
        first.setdefault((their.setting, their.series), _words(their, ours))
    return list(first.values())


def _largest_first(cells: Sequence[Cell]) -> list[tuple[Cell, list[tuple[str, Cell]]]]:
    """Each library's cell with ours of its kind, or with any of ours where there is none of its kind."""
    found = [(their, counterparts(their, cells)) for their in libraries(cells)]
    told = [(their, [pair for pair in ours if pair[0] != ANY] or ours) for their, ours in found if ours]
    return sorted(told, key=lambda t: (t[0].setting, -(t[0].asked["sp_size"] or 0), -(t[0].asked["seq_len"] or 0)))


def _ratio(their: Cell, our: Cell) -> tuple[str, str]:
    """(theirs / ours, what is behind it)."""
    evidence = behind(paired := paired_ratio(their, our), their, our)
    if paired is None:
        return f"{ratio_of_medians(their, our):.3f}x", evidence
    return paired.words, evidence if paired.excludes_1 else f"{evidence}: neither is called faster"


def _words(their: Cell, ours: Sequence[tuple[str, Cell]]) -> Words:
    """Theirs over ours at the same kernel and at our fastest, in one sentence."""
    asked = their.asked
    what = ", ".join(filter(None, (f"{asked['workload']} {asked['pass_kind']}", their.launch_note)))
    where = f"{whole(asked['seq_len'])} tokens on {processors(their)}, {what}: "
    evidence = list(dict.fromkeys(_ratio(their, our)[1] for _, our in ours))
    words = say(f"{where}{with_kernel(their)}, ", median_ms(their), ", takes ")
    for place, (what, our) in enumerate(ours):
        ratio, why = _ratio(their, our)
        words = say(words, ", and " if place else "", ref(ratio, (their, our)), f" the time of {IN_WORDS[what]}, ")
        words = say(words, f"{with_kernel(our)}, ", median_ms(our), "" if len(evidence) == 1 else f" ({why})")
    return say(words, f" ({evidence[0]})." if len(evidence) == 1 else ".")


def _line(their: Cell, what: str, our: Cell) -> Line:
    ratio, evidence = _ratio(their, our)
    texts = (
        *(ref(their.series, their), whole(their.asked["sp_size"]), whole(their.asked["seq_len"])),
        *(str(their.asked["kernel"]), ref(number(their.median_step_ms), their), what, our.series),
        *(str(our.asked["kernel"]), ref(number(our.median_step_ms), our), ratio, evidence),
    )
    return Line(texts, (their, our))
