"""Tables of one real rank beside the same cells with all ranks: for the page, and for docs/ONE_RANK.md."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from sp_bench.analysis import identifiers, words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.grades import DOUBTS
from sp_bench.analysis.held import SMALLEST_SIGN, Edge, Group, Held, Sign, edges, groups, held, signs, traced_exposed_ms
from sp_bench.analysis.metrics import memory_gib, tokens_per_s_per_gpu
from sp_bench.analysis.over_depth import OverDepth, over_depth
from sp_bench.config.conf_files import num_layers
from sp_bench.formats import counted, gib, number
from sp_bench.report.published import Published, beside_one_rank, steps_like
from sp_bench.report.table import Column, Table, plain, section

KEPT = "workload.activation_checkpointing"
ABOUT_GROUPS = (
    "Predicted over measured: times, and peaks of what the same rank allocates beyond what was there before; medians, "
    "with the range. Without delay: messages that take no time. Scaled: as if both machines computed as fast, by the "
    "step without messages, where both measured it, and as it is on the same devices. Kernels, and exposed messages "
    "within 30% or 0.5% of the step: of the one step that was traced. Left out: cells whose measured rows are of older "
    "code, whose messages overlapped with kernels in another way; cells that wait for the host; and lower bounds."
)
ABOUT_CELLS = (
    "Predicted over measured, beside the newest measured cell of equal options, on the same devices if there is one. "
    "Scaled, and exposed (the step less the step without messages): beside the newest that was timed without messages "
    "too. Kernels, and exposed messages in the trace, are of the one step that was traced: time of attention and "
    "matrix products, and time in which messages run and no kernel does. Older: the measured rows are of code whose "
    "messages overlapped in another way. Clock and power: under load, of one rank / of all (median)."
)
ABOUT_SIGNS = (
    "Where rows of all ranks have both beside each other. Above 1 Ulysses leads, below 1 the ring. A sign is asked for "
    f"where they differ by {SMALLEST_SIGN:.0%} or more."
)

ABOUT_EDGES = (
    "Brackets of the longest sequence that searches with all ranks found, and whether one real rank fits at both of "
    "their lengths."
)
ABOUT_LINES = (
    "Steps of one real rank that ran with few layers; the line through two of them gives the step of all. Where the "
    "whole step ran too, that step counts, and a column has the line's values over it. Published: on H100s, of equal "
    "model, length, GPUs, method and options."
)
ABOUT_MAP = (
    "As one real rank ran, with messages as the link model has them; the fastest first. Exposed: time in which "
    "messages run and no kernel does, in the step that was traced. Waits: for the host's launches, so that it says "
    "nothing of the methods."
)


def _range(read: Callable[[Held], float | None]) -> Callable[[Group], str | None]:
    def text(of: Group) -> str | None:
        if not (found := of.values(read)):
            return None
        low, high = f"{found[0]:.3f}", f"{found[-1]:.3f}"
        of_some = f", {counted(len(found), 'cell')}" if len(found) < len(of.of_like_code) else ""
        return f"{median(found):.3f}" + (f" ({low} to {high})" if low != high else "") + of_some

    return text


GROUPS: tuple[Column[Group], ...] = (
    Column("what", lambda of: f"{_what(of.helds[0].one)} on {of.sp_size} GPUs"),
    Column("link model", lambda of: of.link),
    Column("cells", lambda of: len(of.of_like_code)),
    Column("left out: older code", lambda of: len(of.helds) - len(of.of_like_code)),
    Column("time", _range(lambda of: of.ratio)),
    Column("without delay", _range(lambda of: of.ratio_without_delay)),
    Column("scaled", _range(lambda of: of.scaled)),
    Column("kernels", _range(lambda of: of.kernels)),
    Column("exposed near", lambda of: _near(of)),
    Column("peak", _range(lambda of: of.peak)),
)

CELLS: tuple[Column[Held], ...] = (
    Column("what", lambda of: f"{_what(of.one)}, {words.method(of.one)}"),
    Column("ranks", lambda of: of.one.asked["sp_size"]),
    Column("tokens", lambda of: of.one.asked["seq_len"], "{:,}".format),
    Column("kernel", lambda of: words.kernel(of.one)),
    Column("link model", lambda of: of.one.link),
    Column("predicted (ms)", lambda of: of.one.median_step_ms, number),
    Column("measured (ms)", lambda of: of.measured.median_step_ms, number),
    Column("ratio", lambda of: of.ratio, "{:.3f}".format),
    Column("without delay", lambda of: of.ratio_without_delay, "{:.3f}".format),
    Column("scaled", lambda of: of.scaled, "{:.3f}".format),
    Column("exposed (ms)", lambda of: of.exposed_ms, lambda pair: _beside(*pair)),
    Column("kernels", lambda of: of.kernels, "{:.3f}".format),
    Column("exposed in the trace (ms)", lambda of: of.traced_exposed_ms, lambda pair: _beside(*pair)),
    Column("peak", lambda of: of.peak, "{:.3f}".format),
    Column("SM clock (MHz)", lambda of: of.device("sm_clock_mhz"), lambda pair: "{:.0f} / {:.0f}".format(*pair)),
    Column("power (W)", lambda of: of.device("power_w"), lambda pair: "{:.0f} / {:.0f}".format(*pair)),
    Column("devices", lambda of: "same" if of.is_of_one_machine else "others"),
    Column("measured in", lambda of: _campaigns(of.measured) + ("" if of.is_like_code else ", older")),
)

SIGNS: tuple[Column[Sign], ...] = (
    Column("what", lambda of: _what(of.held.one)),
    Column("ranks", lambda of: of.held.one.asked["sp_size"]),
    Column("tokens", lambda of: of.held.one.asked["seq_len"], "{:,}".format),
    Column("kernel", lambda of: words.kernel(of.held.one)),
    Column("link model", lambda of: of.held.one.link),
    Column("ring over Ulysses, measured", lambda of: of.measured, "{:.3f}".format),
    Column("predicted", lambda of: of.predicted, "{:.3f}".format),
    Column("without delay", lambda of: of.without_delay, "{:.3f}".format),
    Column("sign", lambda of: ("right" if of.is_right else "wrong") if of.counts else "not asked for"),
    Column("code", lambda of: "like" if of.is_like_code else "older"),
)

EDGES: tuple[Column[Edge], ...] = (
    Column("what", lambda of: f"{_what(of.ends[0])}, {words.method(of.ends[0])}"),
    Column("options", lambda of: ", ".join(_of_step(of.ends[0]))),
    Column("ranks", lambda of: of.limit.sp_size),
    Column("fits with all ranks", lambda of: of.ends[0].asked["seq_len"], "{:,}".format),
    Column("as one rank", lambda of: _fits(of.ends[0])),
    Column("does not fit with all", lambda of: of.ends[1].asked["seq_len"], "{:,}".format),
    Column("as one rank", lambda of: _fits(of.ends[1])),
    Column("within the bracket", lambda of: "yes" if of.is_right else "no"),
)


LINES: tuple[Column[OverDepth], ...] = (
    Column("what", lambda of: f"{words.model(of.few)}, {words.method(of.few)}"),
    Column("ranks", lambda of: of.few.asked["sp_size"]),
    Column("hosts", lambda of: of.few.asked["num_nodes"] or 1),
    Column("tokens", lambda of: of.few.asked["seq_len"], "{:,}".format),
    Column("kernel", lambda of: words.kernel(of.few)),
    Column("options", lambda of: ", ".join(_of_step(of.few))),
    Column("link model", lambda of: of.few.link),
    Column("layers", lambda of: "{} and {} of {}".format(*of.num_layers_run, of.num_layers)),
    Column("step (s)", lambda of: of.step_ms / 1e3, number),
    Column("tokens/s/GPU", lambda of: of.tokens_per_s_per_gpu, number),
    Column("peak GiB", lambda of: of.peak_gib, gib),
    Column("over the whole step: time, peak", lambda of: of.check, lambda pair: "{:.3f}, {:.3f}".format(*pair)),
    Column("flagged", lambda of: " ".join(sorted(DOUBTS.intersection(of.few.flags + of.more.flags)))),
    Column("published step (s)", lambda of: "; ".join(map(_published, steps_like(of.few))) or None),
    Column("ran in", lambda of: _campaigns(of.few)),
)

MAP: tuple[Column[Cell], ...] = (
    Column("what", lambda cell: _what_of_map(cell)),
    Column("tokens", lambda cell: cell.asked["seq_len"], "{:,}".format),
    Column("ranks", lambda cell: cell.asked["sp_size"]),
    Column("hosts", lambda cell: cell.asked["num_nodes"] or 1),
    Column("link model", lambda cell: cell.link),
    Column("method", words.method),
    Column("ms", lambda cell: cell.median_step_ms, number),
    Column("tokens/s/GPU", tokens_per_s_per_gpu, number),
    Column("exposed (ms)", traced_exposed_ms, "{:.1f}".format),
    Column("peak GiB", memory_gib, gib),
    Column("", lambda cell: "waits" if cell.waits_for_host else ""),
)


def tables(cells: Sequence[Cell]) -> list[Table[Any]]:
    """Those without lines: no cells of one real rank have what they compare with."""
    found = held(cells)
    of_signs = signs(found, cells)
    return [
        plain("One real rank beside all ranks", ABOUT_GROUPS, GROUPS, groups(found)),
        plain("Whole steps from few layers", ABOUT_LINES, LINES, over_depth(cells)),
        beside_one_rank(cells),
        plain("The ring against Ulysses", " ".join([ABOUT_SIGNS, *_right(of_signs)]), SIGNS, of_signs),
        plain("The edge of memory as one real rank", ABOUT_EDGES, EDGES, edges(cells)),
        plain("Each cell of one real rank", ABOUT_CELLS, CELLS, found),
    ]


def markdown(cells: Sequence[Cell]) -> str:
    return "\n".join(filter(None, map(section, tables(cells)))).rstrip()


def map_markdown(cells: Sequence[Cell]) -> str:
    """Attention and whole steps of one real rank, beside each other. Steps of few layers are in the table of lines."""
    whole = [cell for cell in cells if cell.asked["num_layers"] in (None, num_layers(cell.asked["model"]))]
    return section(plain("The map", ABOUT_MAP, MAP, sorted(whole, key=_order_of_map)))


def _order_of_map(cell: Cell) -> tuple[Any, ...]:
    asked = cell.asked
    return (_what_of_map(cell), asked["seq_len"], asked["sp_size"], cell.link, cell.median_step_ms)


def _what_of_map(cell: Cell) -> str:
    is_step = cell.asked["workload"] == "train_step"
    return f"step of {words.model(cell)}" if is_step else f"attention, {words.heads(cell)}"


def _right(found: Sequence[Sign]) -> list[str]:
    """A sentence for each number of ranks."""
    made = []
    for sp_size in sorted({of.held.one.asked["sp_size"] for of in found}):
        asked = [of for of in found if of.counts and of.held.one.asked["sp_size"] == sp_size]
        like = [of for of in asked if of.is_like_code]
        made.append(
            f"On {sp_size} GPUs it is right in {sum(of.is_right for of in asked)} of {len(asked)} places, of like code "
            f"in {sum(of.is_right for of in like)} of {len(like)}."
        )
    return made


def _fits(cell: Cell) -> str:
    return "does not fit" if cell.out_of_memory else "fits"


def _near(of: Group) -> str | None:
    known = [near for each in of.of_like_code if (near := each.exposed_is_near) is not None]
    return f"{sum(known)} of {len(known)}" if known else None


def _of_step(cell: Cell) -> list[str]:
    kept = words.of_step(KEPT, cell.options.get(KEPT))
    return [text for text in (kept, *(words.unusual(cell, path) for path in identifiers.OF_STEP)) if text]


def _what(cell: Cell) -> str:
    return words.setting(cell)[0]


def _published(of: Published) -> str:
    method = words.METHODS[of.where["method"]]
    return f"{of.value} ({of.source}: {method}, {of.stack.partition(', ')[2]})"


def _beside(predicted: float, measured: float) -> str:
    return f"{predicted:.1f} / {measured:.1f}"


def _campaigns(cell: Cell) -> str:
    return ", ".join(sorted({str(row["folder"]) for row in cell.measured}))
