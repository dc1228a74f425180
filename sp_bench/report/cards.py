"""The first screen in words. A card says which method is faster in a setting, by how much, when memory runs out and how
many bytes it sends. The caveats below are in caveats.py."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sp_bench.analysis import metrics, words
from sp_bench.analysis.cells import Cell, narrowed
from sp_bench.analysis.grades import Grade
from sp_bench.analysis.ladder import Ladder, covered, ladders
from sp_bench.analysis.longest import ends
from sp_bench.analysis.ratios import pairs, ranked, ratio_of_pairs
from sp_bench.analysis.rivals import counterparts
from sp_bench.analysis.settings import (
    AHEAD,
    APART,
    BEHIND,
    CLOSE,
    QUESTION,
    TIE,
    UNDECIDED,
    UNPROVEN,
    Difference,
    Place,
    Setting,
    leader,
    place_key,
)
from sp_bench.analysis.words import listed_words, method, the_method
from sp_bench.formats import MISSING, capital, counted, gib, number, thousands, whole

WITHOUT = "by medians, without intervals"
FIT_ONLY = "Only the fit of a step was tested."
WAITING = "Nothing is compared: one real rank ran, and it waits for the host, or its time is a lower bound."
MAX_ALSO = 5  # further lines of a card; the tables have the rest


@dataclass(frozen=True)
class Card:
    """Texts for one setting. The page prints `verdict` in bold if it is `proven`, and grey if `grade` is weak."""

    title: str
    where: str
    verdict: str
    proven: bool
    numbers: str
    memory: str
    also: tuple[str, ...]
    cells: tuple[Cell, ...]
    grade: Grade | None = None  # None: the verdict compares nothing


def cards(settings: Sequence[Setting]) -> list[Card]:
    """One card per setting that no ladder covers, then one per ladder."""
    found = ladders(settings)
    return [*(card(setting) for setting in settings if not covered(setting, found)), *map(_of_ladder, found)]


def _of_ladder(ladder: Ladder) -> Card:
    setting, ran = ladder.setting, ladder.compared
    title = ", ".join(setting.parts)
    if ran and ran[0].processor != "GPU":
        return _of_cpus(setting)
    if not ran:
        answer = WAITING if ladder.measured else "Nothing was measured."
        return Card(title, "", answer, False, "", memory_words(setting), (), setting.cells)
    first, last = ladder.fair or (ran[0], None)
    beside = [cell for cell in ran if cell is not first and ratio_of_pairs(cell, first) is not None]
    last = last or next(reversed(beside), ran[-1])
    smallest = setting.smallest_for(first)
    difference = Difference(first, last, smallest)
    alike = "Equal kernel and recomputation. " if ladder.fair else ""
    ratio = _with_doubt(f"{difference.words} as fast as {ladder.names[last.cell_id]}", difference)
    answer = f"{alike}{ladder.names[first.cell_id]}: {APART if difference.ratio is None else ratio}."
    between = [(Difference(first, cell, smallest), ladder.names[cell.cell_id]) for cell in beside if cell is not last]
    also = tuple(f"{found.words} its time: {name}." for found, name in between)
    more = (f"{counted(len(also) - MAX_ALSO, 'further line')} in the table.",) if len(also) > MAX_ALSO else ()
    return Card(
        title,
        "",
        answer,
        difference.is_proven,
        numbers(setting, [first, last]),
        memory_words(setting),
        also[:MAX_ALSO] + more,
        setting.cells,
        None if difference.ratio is None else difference.grade,
    )


def card(setting: Setting) -> Card:
    place = setting.main
    if any(cell.ok for cell in setting.cells) and all(cell.processor != "GPU" for cell in setting.cells):
        return _of_cpus(setting)
    if place is None and any(cell.ok for cell in setting.cells):
        return _of_kernels(setting)
    if place is None:
        failed = Counter(status for cell in setting.cells for status in cell.statuses if not cell.ok)
        why = ", ".join(f"{n} {status}" for status, n in failed.items())
        if any(cell.fits and not cell.ok for cell in setting.cells):
            return Card(setting.title, "", _longest(setting), False, "", "", (), setting.cells)
        answer = f"Nothing was measured ({why})."
        return Card(setting.title, "", answer, False, "", memory_words(setting), (), setting.cells)
    first = place.first
    where = [
        words.place(first),
        words.fabric(first.asked["fabric"]) if first.asked["sp_size"] > 1 else "",
        words.kernel(first),
    ]
    if not place.contested:
        left_out = any(c.ok and not c.is_comparable and place_key(c) == place_key(first) for c in setting.cells)
        lone = f"Only {the_method(place.leader)} {'can be compared' if left_out else 'was measured'} here."
        also = _also(setting, place)
        figures = numbers(setting, (place.leader,))
        return Card(
            setting.title,
            ", ".join(filter(None, where)),
            lone,
            False,
            figures,
            memory_words(setting),
            also,
            place.cells,
        )
    shown = place.difference
    grade = None if shown is None or shown.ratio is None else shown.grade
    proven = any(d.is_proven for d in place.differences) and not any(d.is_behind for d in place.differences)
    return Card(
        setting.title,
        ", ".join(filter(None, where)),
        verdict(place),
        proven and grade is not None and grade.may_be_bold,
        compared(setting, place),
        memory_words(setting),
        _also(setting, place),
        place.cells,
        grade,
    )


def _of_cpus(setting: Setting) -> Card:
    """Names what was proven and compares no times: those of CPUs do not carry over to GPUs."""
    right = [cell for cell in setting.cells if cell.ok]
    wrong = [cell for cell in setting.cells if "incorrect" in cell.statuses]
    answer = (f"Wrong: {_methods_of(wrong)}. " if wrong else "") + f"Right on CPUs: {_methods_of(right)}."
    sent = [bool(cell.communication.equal) for cell in right if cell.communication.predicted_bytes]
    evidence = [f"{counted(len(right), 'cell')} passed the checks."]
    if sent:
        evidence.append(f"Counted bytes equal the closed form in {sum(sent)} of {len(sent)} that send.")
    failed = Counter(status for cell in setting.cells for status in cell.statuses if not cell.ok)
    also = tuple(f"{n} {status}." for status, n in failed.items())
    return Card(
        setting.title,
        "CPUs: times say nothing of GPUs, so nothing is compared here",
        answer,
        False,
        " ".join(evidence),
        memory_words(setting),
        also,
        setting.cells,
    )


def _methods_of(cells: Sequence[Cell]) -> str:
    """Ulysses, and DeepSpeed's UlyssesSPAttentionHF (hf_deepspeed): names every engine but ours."""
    names = {}  # a dict keeps the order
    for cell in cells:
        name, engine = str(cell.asked["method"]), cell.asked["engine"]
        names[words.METHODS.get(name, name) + (f" ({engine})" if engine not in (None, "fsdp2") else "")] = None
    return listed_words(list(names))


def _of_kernels(setting: Setting) -> Card:
    """Compares kernels without a method, at the longest length."""
    known = [cell for cell in setting.cells if cell.ok and cell.is_comparable]
    if not known:
        return Card(setting.title, "", WAITING, False, "", memory_words(setting), (), setting.cells)
    longest = max(cell.asked["seq_len"] or 0 for cell in known)
    found = [cell for cell in known if (cell.asked["seq_len"] or 0) == longest]
    smallest = setting.smallest_for(found[0])
    first = leader(found, smallest)
    others = [cell for cell in ranked(found) if cell is not first]
    differences = [Difference(first, cell, smallest) for cell in others]
    answer = _verdict(first, differences, method) if others else f"Only {method(first)} was measured."
    sure = bool(differences) and all(d.is_proven for d in differences)
    figures = numbers(setting, [first, *others[:1]])
    memory = memory_words(setting)
    grade = differences[0].grade if differences and differences[0].ratio is not None else None
    return Card(setting.title, words.place(first), answer, sure, figures, memory, (), setting.cells, grade)


def verdict(place: Place) -> str:
    """Ulysses is 1.03x [1.01, 1.04] as fast as the zigzag ring and ties with USP."""
    return _verdict(place.leader, place.differences, the_method) + _of_the_others(place)


def _verdict(first: Cell, differences: Sequence[Difference], called: Callable[[Cell], str]) -> str:
    """A sentence for each outcome that there is. Ties may share the first."""
    of: dict[str, list[Difference]] = {}
    for difference in differences:
        of.setdefault(BEHIND if difference.is_behind else difference.outcome, []).append(difference)

    def names(outcome: str) -> str:
        return listed_words([called(d.slow) for d in of.get(outcome, ())])

    name = called(first)
    if len(of.get(APART, ())) == len(differences):
        return f"Not compared, since no replicates pair: {name} and {names(APART)}."
    ahead = listed_words([f"{d.words} as fast as {called(d.slow)}" for d in of.get(AHEAD, ())])
    sentences = []
    if ahead:
        sentences.append(f"{name} is {ahead}{f' and ties with {names(TIE)}' if TIE in of else ''}")
    elif TIE in of:
        sentences.append(f"A tie: {name}{' and ' if len(of[TIE]) == 1 else ', '}{names(TIE)}")
    if CLOSE in of:
        between = " and " if len(of[CLOSE]) == 1 else ", "
        sentences.append(f"Within {of[CLOSE][0].smallest:.0%} {WITHOUT}: {name}{between}{names(CLOSE)}")
    if UNPROVEN in of:
        medians = listed_words([_by_medians(d, called) for d in of[UNPROVEN]])
        sentences.append(f"{WITHOUT}, {name} is {medians}")
    sentences += [_undecided(d.turned, called) for d in of.get(UNDECIDED, ())]
    for each in (d.turned for d in of.get(BEHIND, ())):
        sentences.append(f"{called(each.fast)} is {_with_doubt(f'{each.words} as fast as {name}', each)}")
    if APART in of:
        sentences.append(f"Not compared with it, since no replicates pair: {names(APART)}")
    return " ".join(f"{capital(sentence)}." for sentence in sentences)


def _undecided(difference: Difference, called: Callable[[Cell], str]) -> str:
    """Undecided: Ulysses is 1.019x [1.013, 1.026] as fast as the zigzag ring."""
    answer = f"Undecided: {called(difference.fast)} is {difference.words} as fast as {called(difference.slow)}"
    if difference.paired:
        return answer
    return f"{answer} by medians, but replicates of one of them differ by {difference.spread:.2f}x"


def _with_doubt(name: str, difference: Difference) -> str:
    return f"{name} ({difference.doubt})" if difference.doubt else name


def _by_medians(difference: Difference, called: Callable[[Cell], str]) -> str:
    claim = f"{difference.words} as fast as {called(difference.slow)}"
    return f"{claim} (their replicates overlap)" if difference.overlaps else claim


def _of_the_others(place: Place) -> str:
    """Which of Ulysses and the ring is faster, if no third method is proven faster or slower; else empty."""
    if any(d.outcome not in (TIE, CLOSE, UNDECIDED) for d in place.differences):
        return ""
    asked = [cell for cell in place.others if cell.asked["method"] in QUESTION]
    if len(asked) < 2 or (difference := Difference(asked[0], asked[1], place.smallest).turned).outcome != AHEAD:
        return ""
    return f" {capital(the_method(difference.fast))} is {difference.words} as fast as {the_method(difference.slow)}."


def compared(setting: Setting, place: Place) -> str:
    """The numbers of the leader and its rival, with their names if the place has more than two methods."""
    shown = numbers(setting, [cell for cell in (place.leader, place.rival) if cell])
    if place.rival and len(place.contenders) > 2:
        return f"{capital(method(place.leader))} against {method(place.rival)}: {shown}"
    return shown


def numbers(setting: Setting, cells: Sequence[Cell]) -> str:
    """160.7k against 155.6k tokens/s a GPU, 604 against 585 TFLOP/s (0.97 and 0.94 of the kernel alone), ... Of two
    cells by the replicates that pair; where none do, of the first alone."""
    if len(cells) == 2:
        keys = pairs(cells[0], cells[1])
        cells = [narrowed(cell, keys) for cell in cells] if keys else cells[:1]
    ranks = cells[0].processor
    shares = [share.ratio if (share := setting.share(cell)) else None for cell in cells]
    known = [f"{value:.2f}" for value in shares if value is not None]
    of_kernel = f" ({' and '.join(known)} of the kernel alone)" if len(known) == len(cells) else ""
    flops = _against(cells, metrics.tflops, number, "TFLOP/s")
    host = all(cell.memory_column == "max_peak_host_bytes" for cell in cells)
    parts = [
        _against(cells, metrics.tokens_per_s_per_gpu, thousands, f"tokens/s a {ranks}"),
        flops and flops + of_kernel,
        _against(cells, lambda cell: cell.mfu, lambda v: f"{v:.0%}", "MFU") if not flops else "",
        _against(cells, metrics.memory_gib, gib, "GiB of host memory" if host else "GiB"),
        _against(cells, metrics.sent_gib, gib, f"GiB sent a {ranks}"),
    ]
    return _sentence(", ".join(filter(None, parts)))


def memory_words(setting: Setting) -> str:
    """The shortest lengths that ran out of memory and the longest that ran; or that nothing ran out."""
    failed = setting.out_of_memory
    lengths = [cell.asked["seq_len"] for cell in setting.cells if cell.fits and cell.asked["seq_len"]]
    if not failed:
        return f"Nothing ran out of memory up to {whole(max(lengths))} tokens." if lengths else ""
    brackets = []
    for limit in setting.limits:
        if (oom := limit.smallest_oom) is not None:
            ran = "nothing ran"
            if (largest := limit.largest_ok) is not None:
                tokens = whole(largest.asked["seq_len"])
                ran = f"{tokens} ran" if largest.ok else f"{tokens} fit"
            detail = f"{ran}; {limit.exhausted_memory}" if limit.exhausted_memory else ran
            brackets.append(
                f"{the_method(oom)} on {words.processors(oom)} at {whole(oom.asked['seq_len'])} tokens ({detail})"
            )
    return f"Out of memory: {'; '.join(brackets[:3])}{f'; and {len(brackets) - 3} more' if len(brackets) > 3 else ''}."


def _longest(setting: Setting) -> str:
    """The longest that fits: UPipe on 2 GPUs 425,984 tokens (not 442,368: out of device memory), ..."""
    found = [(limit.largest_ok, limit) for limit in setting.limits if limit.largest_ok]
    found.sort(key=lambda each: (-each[0].asked["seq_len"], each[0].cell_id))
    brackets = []
    for cell, limit in found:
        fits = f"{the_method(cell)} on {words.processors(cell)} {ends(limit)[0]} tokens"
        if limit.smallest_oom is not None:
            fails, memory = whole(limit.smallest_oom.asked["seq_len"]), limit.exhausted_memory or "device memory"
            fits += f" (not {fails}: out of {memory})"
        brackets.append(fits)
    return f"The longest that fits, tested without a time: {', '.join(brackets)}." if brackets else FIT_ONLY


def _also(setting: Setting, main: Place) -> tuple[str, ...]:
    """Libraries beside our methods, then the answers of the other places, grouped by answer."""
    wheres_of: dict[str, list[str]] = {}
    for place in reversed(setting.contests):
        if place is not main:
            wheres_of.setdefault(_outcome(place), []).append(_apart(place, main))
    # An answer that several places share is printed once.
    lines = [f"{outcome}: {'; '.join(wheres[:3])}{f' and {len(wheres) - 3} more' if len(wheres) > 3 else ''}."
             for outcome, wheres in wheres_of.items()]  # fmt: skip
    libraries = [_library(their, ours, setting.smallest_for(their)) for their, ours in _libraries(setting)]
    lines = [*libraries[:3], *lines]
    more = len(lines) - MAX_ALSO
    return (*lines[:MAX_ALSO], *((f"{counted(more, 'further finding')} in the table.",) if more > 0 else ()))


def _libraries(setting: Setting) -> list[tuple[Cell, Cell]]:
    """(library, our method of its kind on its kernel), at the longest length at which both ran side by side."""
    found: dict[str, tuple[Cell, Cell]] = {}
    cells = [c for c in setting.cells if c.ok and c.is_comparable and c.asked["fabric"] == setting.fabrics[0]]
    for their, ours in sorted(
        counterparts(cells), key=lambda pair: (-pair[0].asked["sp_size"], -pair[0].asked["seq_len"])
    ):
        if Difference(ours, their).ratio is not None:
            found.setdefault(f"{method(their)} {their.asked['kernel']}", (their, ours))
    return list(found.values())


def _library(their: Cell, ours: Cell, smallest: float) -> str:
    difference = Difference(ours, their, smallest).turned
    where = f"on {words.kernel(their)}, {words.place(their)}"
    if difference.outcome == TIE:
        return f"{the_method(their)} ties with our {method(ours)} {where}."
    doubt = f" ({difference.doubt})" if difference.doubt else ""
    if difference.fast is their:
        return f"{method(their)} is {difference.words} as fast as our {method(ours)} {where}{doubt}."
    return f"Our {method(ours)} is {difference.words} as fast as {method(their)} {where}{doubt}."


def _outcome(place: Place) -> str:
    """The answer at another place in a few words. Places with equal answers share a line."""
    difference = place.difference
    names = capital(listed_words([method(cell) for cell in (place.leader, place.rival) if cell]))
    if difference is None or difference.ratio is None:
        return f"{names}, never side by side"
    if difference.outcome == TIE:
        return f"{names} tie"
    if difference.outcome == CLOSE:
        return f"{names} {difference.doubt}"
    doubt = f", {difference.doubt}" if difference.doubt else ""
    return f"{capital(method(difference.fast))} ahead of {the_method(difference.slow)}{doubt}"


def _apart(place: Place, main: Place) -> str:
    """How a place differs from the main one, with the ratio unless it is a tie."""
    here, there = place.first.asked, main.first.asked
    parts = []
    if here["seq_len"] != there["seq_len"]:
        parts.append(f"{whole(here['seq_len'])} tokens")
    if (here["sp_size"], here["world_size"]) != (there["sp_size"], there["world_size"]):
        parts.append(words.processors(place.first))
    if here["fabric"] != there["fabric"]:
        parts.append(words.fabric(here["fabric"]))
    if here["kernel"] != there["kernel"]:
        parts.append(words.kernel(place.first))
    if place.first.name.pack != main.first.name.pack:
        parts.append(words.pack(place.first))
    difference = place.difference
    ratio = f" {difference.words}" if difference and difference.outcome not in (TIE, CLOSE, APART) else ""
    return f"{', '.join(parts)}{ratio}"


def _against(
    cells: Sequence[Cell], read: Callable[[Cell], float | None], shown: Callable[[float], str], unit: str
) -> str:
    """604 against 585 TFLOP/s. One number if both are equal; empty if one is unknown."""
    values = [value for cell in cells if (value := read(cell)) is not None]
    if len(values) < len(cells):
        return ""
    texts = list(dict.fromkeys(map(shown, values)))
    return f"{' against '.join(texts)} {unit}" if texts != [MISSING] else ""


def _sentence(text: str) -> str:
    return f"{text}." if text else ""
