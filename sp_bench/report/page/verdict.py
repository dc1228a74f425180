"""What the rows say, in words. Every number is computed here from cells, and refers to them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from sp_bench.report.cells import Cell
from sp_bench.report.device_sets import several
from sp_bench.report.effort import Effort, effort
from sp_bench.report.fabric_model import foremost, places
from sp_bench.report.formats import counted, number, whole
from sp_bench.report.limits import Limit, limits
from sp_bench.report.page import fabrics, launches, offload, rivals
from sp_bench.report.page.comparisons import by_place, compare, headline, largest_places, unclaimed
from sp_bench.report.page.parts import Words, listing, processors, ref, say
from sp_bench.report.provenance import mixing
from sp_bench.report.ratios import flagged
from sp_bench.report.selection import Selection
from sp_bench.report.winners import best_of_methods


@dataclass(frozen=True)
class Verdict:
    headlines: Mapping[str, tuple[Words, ...]]  # by setting: what the largest place says
    out_of_memory: tuple[Words, ...]
    findings: tuple[Words, ...]  # across settings
    caveats: tuple[Words, ...]  # what is not claimed, and on the whole
    comparisons: Mapping[str, tuple[Words, ...]]  # by setting: one sentence a (sp_size, seq_len), largest first


def judge(cells: Sequence[Cell], selection: Selection) -> Verdict:
    speeds = [cell for cell in cells if cell.ok and cell.is_of_a_length]
    shown = foremost(speeds, places(cells))
    contested = [(place, group) for place, group in by_place(shown) if len(best_of_methods(group)) > 1]
    contests = [best_of_methods(group) for _, group in contested]
    comparisons: dict[str, list[Words]] = {}
    for ranked in contests:
        comparisons.setdefault(ranked[0].setting, []).append(compare(ranked))
    findings = [*fabrics.summary(cells), *rivals.summary(cells), *offload.summary(cells), *launches.summary(cells)]
    caveats = [*unclaimed(contests), *_counts(cells), *_device_sets(cells), *_bytes(cells)]
    caveats += [*_parity(cells), *_alone(speeds), *_effort(selection, cells)]
    if mixed := mixing(cells):
        caveats.append((f"{mixed[0].upper()}{mixed[1:]}.",))
    if len(shown) < len(speeds):
        caveats.append(("Of each setting this is the fastest fabric; all of them are compared under Fabrics.",))
    return Verdict(
        {setting: headline(group, speeds) for setting, group in largest_places(contested).items()},
        tuple(_out_of_memory(cells)),
        tuple(findings),
        tuple(caveats),
        {setting: tuple(lines) for setting, lines in comparisons.items()},
    )


def _counts(cells: Sequence[Cell]) -> list[Words]:
    statuses = Counter(str(row["status"]) for cell in cells for row in cell.rows)
    if not statuses:
        return [("There are no rows: nothing was measured, and nothing can be said.",)]
    ordered = sorted(statuses.items(), key=lambda item: (item[0] != "ok", -item[1], item[0]))
    parts = [ref(f"{quantity:,} {status}", (c for c in cells if status in c.statuses)) for status, quantity in ordered]
    return [say(ref(counted(statuses.total(), "trial"), cells), ": ", listing([(part,) for part in parts]), ".")]


def _device_sets(cells: Sequence[Cell]) -> list[Words]:
    """Nothing where all trials whose devices are known ran on one set."""
    ran = Counter(number for cell in cells for number in cell.ran_on)
    if not (told := several(ran)):
        return []
    each = [(ref(counted(ran[n], "trial"), (c for c in cells if n in c.ran_on)),) for n in sorted(ran)]
    beware = ". Equal machines are not equally fast: a difference between trials of two sets may be theirs."
    return [say(f"On {told}: ", listing(each), beware)]


def _effort(selection: Selection, cells: Sequence[Cell]) -> list[Words]:
    columns = selection.rows[["status", "duration_s", "phase_s"]]
    spent = effort([dict(zip(columns, row, strict=True)) for row in columns.itertuples(index=False)])
    return [effort_words(spent, cells)] if spent.shares else []


def effort_words(spent: Effort, cells: Sequence[Cell]) -> Words:
    """What the time of launched trials went to."""
    shares = listing([say(f"{what} ", ref(f"{share:.0%}", cells)) for what, share in spent.shares.items()])
    trials = ref(counted(spent.num_trials, "launched trial"), cells)
    words = say("Of ", ref(f"{number(spent.wall_s)} s", cells), " in ", trials, ": ", shares, ".")
    if not spent.num_unknown:
        return words
    return say(words, " What ", ref(counted(spent.num_unknown, "further trial"), cells), " took is not known by phase.")


def _out_of_memory(cells: Sequence[Cell]) -> list[Words]:
    """Per setting and sp_size, the most ranks first: the shortest length at which anything was out of memory, what, and
    the longest that ran."""
    found = sorted(limits(cells), key=lambda limit: (limit.setting, -limit.sp_size))
    groups = groupby(found, key=lambda limit: (limit.setting, limit.sp_size))
    sentences = [_first_out_of_memory(setting, list(group)) for (setting, _), group in groups]
    return [sentence for sentence in sentences if sentence is not None]


def _first_out_of_memory(setting: str, group: Sequence[Limit]) -> Words | None:
    failed = [limit.smallest_oom for limit in group if limit.smallest_oom is not None]
    if not failed:
        return None
    length = min(cell.asked["seq_len"] for cell in failed)
    first = [cell for cell in failed if cell.asked["seq_len"] == length]
    words = say("Out of memory first: ", ref(f"{_names(first)} at {whole(length)} tokens", first))
    words = say(words, f" on {processors(first[0])}")
    ran = [limit.largest_ok for limit in group if limit.largest_ok is not None]
    longest = max((cell.asked["seq_len"] for cell in ran), default=None)
    if longest is not None:
        best = [cell for cell in ran if cell.asked["seq_len"] == longest]
        words = say(words, "; longest that ran: ", ref(f"{_names(best)} at {whole(longest)}", best), flagged(*best))
    return say(words, f" ({setting}).")


def _names(cells: Sequence[Cell]) -> str:
    names = sorted({cell.series for cell in cells})
    return ", ".join(names) if len(names) <= 5 else f"{', '.join(names[:5])} and {len(names) - 5} more"


def _bytes(cells: Sequence[Cell]) -> list[Words]:
    """Of the cells that send anything, and whose bytes have a closed form."""
    sums = [(c, c.communication) for c in cells if c.communication.equal is not None]
    compared = [cell for cell, comm in sums if comm.predicted_bytes or comm.counted_bytes]
    if not compared:
        return []
    what, quantity = "Bytes counted from the issued collectives", ref(counted(len(compared), "cell"), compared)
    if different := [c for c in compared if not c.communication.equal]:
        return [
            say(what, " differ from the closed form in ", ref(f"{len(different)}", different), " of ", quantity, ".")
        ]
    every = "all " if len(compared) > 1 else ""
    return [say(what, f" equal the closed form in {every}", quantity, " that have one and send.")]


def _parity(cells: Sequence[Cell]) -> list[Words]:
    name = "NLL difference, nats"
    found = [c for c in cells if name in c.errors]
    if not found:
        return []
    worst = max(found, key=lambda c: c.errors[name][0])
    words = say("Training parity over ", ref(counted(len(found), "cell"), found), ": NLL differs by at most ")
    return [say(words, ref(f"{number(worst.errors[name][0])} nats", worst), ".")]


def _alone(speeds: Sequence[Cell]) -> list[Words]:
    lonely = [c for _, group in by_place(speeds) if len(best_of_methods(group)) == 1 for c in group]
    if not lonely:
        return []
    quantity = ref(counted(len(lonely), "cell"), lonely)
    return [say("Without a rival on their kernel, seq_len and sp_size: ", quantity, f" ({_names(lonely)}).")]
