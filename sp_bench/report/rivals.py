"""The section on other libraries: each against our method of the same kind, in the same setting, length and ranks."""

from collections.abc import Sequence

from sp_bench.report.compare import by_medians, fastest, paired_ratio, ratio_of_medians
from sp_bench.report.formats import counted, number, whole
from sp_bench.report.parts import Line, Section, Table
from sp_bench.report.series import OWN_CODE
from sp_bench.report.tables import Cell

COUNTERPARTS = {"ring_flash_attn": "ring", "deepspeed_ulysses": "ulysses"}  # a library's method -> ours of its kind
ANY = "any method of ours"
HEAD = (
    *("theirs", "sp_size", "seq_len (tokens)", "kernel", "step (ms)", "compared with", "ours", "our kernel"),
    *("our step (ms)", "theirs / ours", "evidence"),
)
CAPTION = (
    "Step time of a library over ours in the same setting, length and number of ranks: above 1, ours is faster. Same "
    "kernel and fastest kernel: our method of the same kind and layout, of several the one with the smallest median; "
    f"{ANY}: the fastest of all. Intervals are of the paired ratio."
)


def section(cells: Sequence[Cell]) -> Section | None:
    theirs = [c for c in cells if c.ok and c.asked["implementation"] not in (None, OWN_CODE)]
    theirs = [c for c in theirs if c.asked["workload"] not in ("parity", "collective")]
    pairs = [(their, what, our) for their in theirs for what, our in _ours(their, cells)]
    if not pairs:
        return None
    settings = list(dict.fromkeys(their.setting for their, _, _ in pairs))
    tables = tuple(
        Table(s, CAPTION, HEAD, tuple(_line(*pair) for pair in pairs if pair[0].setting == s), (0, 3, 5, 6, 7, 10))
        for s in settings
    )
    alike = {their.cell_id for their, what, _ in pairs if what != ANY}
    told = [pair for pair in pairs if pair[1] != ANY or pair[0].cell_id not in alike]
    points = tuple(_words(*pair) for pair in sorted(told, key=_largest_first))
    return Section("rivals", "Against other libraries", points=points, tables=tables)


def _ours(their: Cell, cells: Sequence[Cell]) -> list[tuple[str, Cell]]:
    """(what is compared, our fastest such cell)."""
    where = ("sp_size", "seq_len")
    own = [c for c in cells if c.ok and c.asked["implementation"] == OWN_CODE and c.setting == their.setting]
    own = [c for c in own if all(c.asked[name] == their.asked[name] for name in where)]
    kind = COUNTERPARTS.get(str(their.asked["method"]))
    alike = [c for c in own if c.asked["method"] == kind and c.asked["layout"] == their.asked["layout"]]
    same_kernel = [c for c in alike if c.asked["kernel"] == their.asked["kernel"]]
    groups = {"same kernel": same_kernel, "our fastest kernel": alike, ANY: own}
    return [(what, fastest(group)) for what, group in groups.items() if group]


def _largest_first(pair: tuple[Cell, str, Cell]) -> tuple[str, int, int]:
    asked = pair[0].asked
    return pair[0].setting, -(asked["sp_size"] or 0), -(asked["seq_len"] or 0)


def _ratio(their: Cell, our: Cell) -> tuple[str, str]:
    """(theirs / ours, what is behind it)."""
    if (paired := paired_ratio(their, our)) is None:
        return f"{ratio_of_medians(their, our):.3f}x", by_medians(their, our)
    evidence = f"paired over {paired.pairs} replicates, coverage {paired.interval.coverage:.1%}"
    return paired.words, evidence if paired.excludes_1 else f"{evidence}: neither is called faster"


def _named(cell: Cell) -> str:
    return cell.series if "kernel=" in cell.series else f"{cell.series} with {cell.asked['kernel']}"


def _words(their: Cell, what: str, our: Cell) -> str:
    ratio, evidence = _ratio(their, our)
    asked = their.asked
    where = f"{whole(asked['seq_len'])} tokens on {counted(asked['sp_size'], 'rank')}"
    times = f"{number(their.median_step_ms)} ms against {number(our.median_step_ms)} ms"
    return (
        f"{where}, {asked['workload']} {asked['pass_kind']}, {what}: {_named(their)} takes {ratio} the time of "
        f"{_named(our)} ({times}; {evidence})."
    )


def _line(their: Cell, what: str, our: Cell) -> Line:
    texts = (
        *(their.series, whole(their.asked["sp_size"]), whole(their.asked["seq_len"]), str(their.asked["kernel"])),
        *(number(their.median_step_ms), what, our.series, str(our.asked["kernel"]), number(our.median_step_ms)),
        *_ratio(their, our),
    )
    return Line(texts, (*their.files, *(f"ours: {file}" for file in our.files)))
