"""Caveats below the cards, a line each: what ran, on which machines, and what is in doubt."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.device_sets import several
from sp_bench.analysis.losses import sentences as first_losses
from sp_bench.analysis.provenance import mixing
from sp_bench.analysis.settings import Setting
from sp_bench.analysis.signs import counts
from sp_bench.analysis.words import listed_words
from sp_bench.costs.slow_devices import slow_devices
from sp_bench.formats import capital, counted
from sp_bench.rows import git

MAX_COUNTS = 3


def caveats(cells: Sequence[Cell], settings: Sequence[Setting], plan: Sequence[str]) -> list[str]:
    """Lines on what ran, on which machines, and what is in doubt. plan: lines on which planned trials ran."""
    measured = [cell for cell in cells if cell.ok]
    lines = [f"{count.where}: {count.words}." for count in counts(settings)[:MAX_COUNTS]]
    slow = [f"{capital(line)}." for line in slow_devices(row for cell in measured for row in cell.measured)]
    lines += [*plan, *_machines(cells), *slow, *_replicates(measured), *_flags(measured), *_bytes(measured)]
    lines += [*first_losses(cells), *_unsampled(measured), *_one_rank(measured), *_code(cells)]
    if mixed := mixing(cells):
        lines.append(capital(mixed) + ".")
    if any(cell.options.get("isolation") == "group" for cell in measured):
        lines.append("Trials share warm processes (isolation=group).")
    if any(cell.processor != "GPU" for cell in measured):
        lines.append("CPU timings show that the path works: compare them with nothing.")
    return lines


def statuses(cells: Sequence[Cell]) -> str:
    """75 trials: 74 ok, 1 oom."""
    found = Counter(str(row["status"]) for cell in cells for row in cell.rows)
    ordered = sorted(found.items(), key=lambda item: (item[0] != "ok", -item[1]))
    return f"{counted(found.total(), 'trial')}: {', '.join(f'{n:,} {status}' for status, n in ordered)}."


def missing(cells: Sequence[Cell], planned: Mapping[str, str] | None) -> str:
    """5 of 10 planned trials are missing: the ring (5). planned: trial_id -> method; None without a plan."""
    if planned is None:
        return "Plan unknown, so missing trials are unknown."
    done = {row["trial_id"] for cell in cells for row in cell.rows}
    left = Counter(method for trial_id, method in planned.items() if trial_id not in done)
    if not left:
        return "No planned trial is missing."
    most_first = sorted(left.items(), key=lambda each: (-each[1], each[0]))
    names = listed_words([f"{words.METHODS.get(name, name)} ({n:,})" for name, n in most_first])
    are = "is" if left.total() == 1 else "are"
    return f"{left.total():,} of {counted(len(planned), 'planned trial')} {are} missing: {names}."


def _machines(cells: Sequence[Cell]) -> list[str]:
    sets = several(number for cell in cells for number in cell.ran_on)
    if not sets:
        return []
    spread = machine_spread(cells)
    if spread is None:
        return [f"Ran on {sets}. Compare within one machine."]
    apart, num_cells, num_alike = spread
    differ = "differs" if num_cells == 1 else "differ"
    return [
        f"Ran on {sets}; {counted(num_cells, 'equal cell')} {differ} by {apart:.1%} between them (the median of their "
        f"largest differences), and {num_alike} of them had the same code and libraries on several. Compare within one "
        "machine."
    ]


def machine_spread(cells: Sequence[Cell]) -> tuple[float, int, int] | None:
    """How much medians of equal cells on separate devices differ, relative to the smallest: the median over cells. Then
    the number of such cells, and of those that ran with one core_id on several. None without such cells."""
    found: dict[object, dict[int, list[float]]] = {}
    of_code: dict[object, dict[str, set[int]]] = {}
    for cell in (each for each in cells if each.is_of_a_length):
        options = cell.but()
        for key, row in cell.launches.items():
            if (where := row["device_set"]) is not None:
                found.setdefault(options, {}).setdefault(where, []).append(cell.step_ms[key])
                of_code.setdefault(options, {}).setdefault(str(row["core_id"]), set()).add(where)
    middles = {options: [median(ms) for ms in sets.values()] for options, sets in found.items() if len(sets) > 1}
    if not middles:
        return None
    alike = sum(any(len(sets) > 1 for sets in of_code[options].values()) for options in middles)
    return median(max(each) / min(each) - 1 for each in middles.values()), len(middles), alike


def _replicates(measured: Sequence[Cell]) -> list[str]:
    few = [cell for cell in measured if cell.is_of_a_length and cell.interval_ms is None]
    total = sum(cell.is_of_a_length for cell in measured)
    if not few:
        return []
    have = "has" if len(few) == 1 else "have"
    return [
        f"{len(few)} of {counted(total, 'cell')} {have} no interval: fewer than 6 replicates, or of "
        "several campaigns or machines."
    ]


def _flags(measured: Sequence[Cell]) -> list[str]:
    rows = Counter(flag for cell in measured for flag in cell.flags)
    doubts = [f"{words.FLAGS.get(flag, flag)} ({n})" for flag, n in rows.most_common()]
    messages = sum(cell.asked["workload"] == "collective" for cell in measured)
    among = f", {messages} of which are messages alone" if messages else ""
    return [f"Doubts, of {counted(len(measured), 'cell')}{among}: {'; '.join(doubts)}."] if doubts else []


def _bytes(measured: Sequence[Cell]) -> list[str]:
    sums = [cell for cell in measured if cell.communication.equal is not None and cell.communication.predicted_bytes]
    different = [cell for cell in sums if not cell.communication.equal]
    if not sums:
        return []
    if different:
        return [f"Counted bytes differ from the closed form in {len(different)} of {counted(len(sums), 'cell')}."]
    every = "all " if len(sums) > 1 else ""
    return [f"Counted bytes equal the closed form in {every}{counted(len(sums), 'cell')} that send."]


def _unsampled(measured: Sequence[Cell]) -> list[str]:
    number = sum(cell.num_unsampled for cell in measured)
    return [f"Gradients were not checked at the timed length in {counted(number, 'older row')}."] if number else []


def _one_rank(measured: Sequence[Cell]) -> list[str]:
    number = sum(not cell.all_ranks_were_there for cell in measured)
    proven = "Other rows prove their methods: each row names one (proof)."
    return [f"{counted(number, 'cell')} of one real rank, with modelled messages. {proven}"] if number else []


def _code(cells: Sequence[Cell]) -> list[str]:
    rows = [row for cell in cells for row in cell.rows]
    shas = sorted({git.short(row["git_sha"]) for row in rows if isinstance(row["git_sha"], str)})
    unknown = sum(not isinstance(row["git_sha"], str) for row in rows)
    if not shas:
        return ["The rows have no commit."] if rows else []
    more = f"; {counted(unknown, 'row')} without a commit" if unknown else ""
    return [f"Code: {', '.join(shas)}{more}."]
