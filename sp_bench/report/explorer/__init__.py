"""The explorer: one HTML file over many campaigns, with pickers, two panels over length, and verdicts. It needs no
network: rows, sentences and Vega-Lite, which draws, are inside it.

Campaigns are not pooled: each mark is of one, and a verdict compares cells of one. All sentences are made here, not in
the page's script.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell, cells, of_equal_steps
from sp_bench.analysis.grades import Grade, grade, legend
from sp_bench.analysis.identifiers import RECOMPUTED
from sp_bench.analysis.metrics import memory_gib, mj_per_token, sent_gib
from sp_bench.analysis.ratios import of_one_machine
from sp_bench.analysis.selection import select
from sp_bench.analysis.settings import SMALLEST, Difference, Setting, is_baseline, settings
from sp_bench.config.options import BY_PATH
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.config.workload import TRAINING
from sp_bench.formats import counted, whole
from sp_bench.report.anonymous import anonymous
from sp_bench.report.explorer.verdicts import Verdict, stack, verdicts
from sp_bench.report.figures.style import colour
from sp_bench.report.setting_tables import rate_of
from sp_bench.rows import campaign_file

DIGITS = 5  # of numbers on the page
MAX_TEXT = 2000  # characters
# Parts of titles that labels do without: the other lines say what they have
UNSET = {words.option(words.PACKING, "none"), *(words.option(path, None) for path in BY_PATH)}
Numbers = tuple[float | None, float | None, float | None]  # a value and its interval


def page(
    folders: Sequence[Path],
    smallest: float = SMALLEST,
    *,
    hide_names: bool = False,
    executor: Executor | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> tuple[str, tuple[str, ...]]:
    """The explorer of some campaigns, and a line for each file that was skipped.

    hide_names: as `report --anonymous`.

    Raises:
        ConfigError: Vega-Lite is not installed, or there is nothing to show.
        OSError: a campaign cannot be read.
    """
    drawer = vega_lite()
    say("reading rows")
    selection = select(folders, executor=executor)
    by_hand, unread = campaign_file.read_all([] if hide_names else folders)
    commands = {
        folder.resolve().name: [each.words for each in known.commands]
        for folder, known in zip(folders, by_hand, strict=False)
    }
    rows = (anonymous(selection) if hide_names else selection).rows
    say(f"summarising {counted(len(rows), 'row')}")
    pools = [f"{pool}; {folder}" for pool, folder in zip(rows["pool"], rows["folder"], strict=True)]
    found = settings(cells(of_equal_steps(rows.assign(pool=pools))), smallest)
    return html(data(found, commands), drawer), (*selection.problems, *unread)


def vega_lite() -> str:
    """The script of Vega-Lite and what it needs, 900 kB."""
    try:
        import vl_convert
    except ImportError:
        raise ConfigError("--explore draws with Vega-Lite: pip install 'sp-bench[explorer]'") from None
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def html(content: Mapping[str, Any], drawer: str) -> str:
    """The page. Data is JSON without < and &, so that no name in it becomes HTML."""
    source, style, script = (
        files(__name__).joinpath(f"explorer.{suffix}").read_text("utf-8") for suffix in ("html.jinja", "css", "js")
    )
    allowed = " ".join(map(_digest, (drawer, script)))  # nothing is loaded, and only these two scripts run
    policy = f"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; script-src {allowed}"
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", r"\u003c").replace("&", r"\u0026")
    ours = {"style": style, "drawer": drawer, "script": script, "data": text}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(
        policy=policy, grades=legend(), **{name: Markup(each) for name, each in ours.items()}
    )


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _what(cell: Cell) -> str:
    window = f"window of {whole(cell.asked['window'])}" if cell.asked["window"] else ""
    packed = "packed documents" if words.is_packed(cell) else ""
    mask = "" if cell.asked["causal"] in (True, None) else "not causal"
    return ", ".join(filter(None, [words.workload(cell), packed, mask, window]))


def _model(cell: Cell) -> str:
    return words.model(cell) if cell.asked["workload"] in TRAINING else words.heads(cell)


def _link(cell: Cell) -> str:
    modelled = cell.link
    fabric = words.fabric(cell.asked["fabric"]) if (cell.asked["world_size"] or 1) > 1 else ""
    return f"{fabric}, modelled: {modelled}" if modelled else fabric


def _grade(cell: Cell) -> Grade:
    if not cell.ok and cell.all_ranks_were_there:
        return Grade("", "only the fit was tested" if cell.fits else "out of memory")
    return grade((cell,), of_one_machine(cell.launches, cell))


PICKERS: Mapping[str, tuple[str, Callable[[Cell], str]]] = {  # name -> head, value of a cell
    "what": ("what", _what),
    "model": ("model or heads", _model),
    "gpus": ("GPUs", words.processors),
    "gpu": ("GPU", words.hardware),
    "link": ("link", _link),
    "kernel": ("kernel", words.kernel),
    "method": ("method", words.plain_method),
    "stack": ("stack", stack),
    "recomputed": ("recomputed", lambda cell: words.of_step(RECOMPUTED, cell.options[RECOMPUTED])),
    "evidence": ("evidence", lambda cell: str(cell.asked["evidence"])),
    "campaign": ("campaign", lambda cell: str(cell.rows[0]["folder"])),
}
OPEN = ("what", "model", "gpus", "gpu", "link", "kernel", "evidence")  # chosen when the page opens


def _timed(read: Callable[[Cell], float | None], power: int) -> Callable[[Cell], Numbers]:
    """A number that goes with a power of the step time, and its interval with that of the step time."""

    def numbers(cell: Cell) -> Numbers:
        value, ms, interval = read(cell), cell.median_step_ms, cell.interval_ms
        if value is None or not ms or interval is None:
            return value, None, None
        low, high = sorted(value * (bound / ms) ** power for bound in (interval.low, interval.high))
        return value, low, high

    return numbers


def _energy(cell: Cell) -> float | None:
    return None if is_baseline(cell) else mj_per_token(cell)  # a kernel alone does a share of the work on all tokens


QUANTITIES: Mapping[str, tuple[str, Callable[[Cell], Numbers]]] = {  # name -> head, numbers of a cell
    "tokens_per_s": ("tokens/s a GPU", _timed(rate_of, -1)),
    "step": ("step time, ms", _timed(lambda cell: cell.median_step_ms, 1)),
    "mfu": ("MFU", _timed(lambda cell: cell.mfu, -1)),
    "memory": ("peak memory, GiB", lambda cell: (memory_gib(cell), None, None)),
    "sent": ("sent by a rank in a step, GiB", lambda cell: (sent_gib(cell), None, None)),
    "energy": ("energy, mJ a token", lambda cell: (_energy(cell), None, None)),
}


def _ratios(found: Sequence[Setting]) -> dict[str, Numbers]:
    """cell_id -> its step time over that of Ulysses at its place."""
    ratios: dict[str, Numbers] = {}
    for place in (place for setting in found for place in setting.places):
        ulysses = place.of_kind("ulysses")
        for to in (Difference(ulysses, cell) for cell in place.cells if ulysses):
            interval = to.paired and to.paired.interval
            ratios[to.slow.cell_id] = to.ratio, interval and interval.low, interval and interval.high
    return ratios


def data(found: Sequence[Setting], commands: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What the page carries: columns of cells, lines of the panels, and verdicts. commands: of each campaign.

    Raises:
        ConfigError: no cell has a length.
    """
    kept = {cell.cell_id: cell for setting in found for cell in setting.cells if _is_shown(cell)}
    if not kept:
        raise ConfigError("--explore: no attention and no training step in these rows ran or was out of memory")
    number_of = {cell.cell_id: number for number, setting in enumerate(found) for cell in setting.cells}
    index = {cell_id: i for i, cell_id in enumerate(kept)}
    lines: dict[tuple[Any, ...], int] = {}
    of_line = [lines.setdefault((number_of[i], *_line(cell)), len(lines)) for i, cell in kept.items()]
    made, ratios, grades = verdicts(found), _ratios(found), {i: _grade(cell) for i, cell in kept.items()}
    first = made[0].difference.fast if made else next(iter(kept.values()))
    pickers = {**PICKERS, "grade": ("grade", lambda cell: grades[cell.cell_id].mark)}
    read = {**QUANTITIES, "ratio": ("time, Ulysses = 1", lambda cell: ratios.get(cell.cell_id, (None,) * 3))}
    return {
        "pickers": [
            {"name": name, "head": head, **_texts(map(value, kept.values()))} for name, (head, value) in pickers.items()
        ],
        "open": {name: shown(PICKERS[name][1](first), MAX_TEXT) for name in OPEN},
        "quantities": [
            {"name": name, "head": head, **_columns(map(numbers, kept.values()))}
            for name, (head, numbers) in read.items()
        ],
        "why": _texts(each.why for each in grades.values()),
        "colour": _texts(map(colour, kept.values())),
        "tokens": [cell.asked["seq_len"] for cell in kept.values()],
        "oom": [int(cell.out_of_memory) for cell in kept.values()],
        "rows": [[str(row["file"]).rpartition("/")[2] for row in cell.rows] for cell in kept.values()],
        "line": of_line,
        "lines": [{"setting": line[0], "name": shown(line[-1], MAX_TEXT)} for line in lines],
        "settings": [[shown(part, MAX_TEXT) for part in setting.parts if part not in UNSET] for setting in found],
        "commands": {
            shown(name, MAX_TEXT): [shown(each, MAX_TEXT) for each in known] for name, known in commands.items()
        },
        "verdicts": [_as_json(each, index) for each in made],
    }


def _is_shown(cell: Cell) -> bool:
    return cell.is_of_a_length and bool(cell.asked["seq_len"]) and (cell.ok or cell.fits or cell.out_of_memory)


def _line(cell: Cell) -> tuple[Any, ...]:
    """Equal for cells of a setting that differ in length alone; its name comes last."""
    place = (cell.asked[name] for name in ("fabric", "world_size", "sp_size", "kernel"))
    return (*place, ", ".join(filter(None, [words.method(cell), words.pack(cell)])) + words.bound(cell))


def _texts(texts: Iterable[str]) -> dict[str, Any]:
    """Each text once, and which one a cell has."""
    known: dict[str, int] = {}
    of = [known.setdefault(shown(text, MAX_TEXT), len(known)) for text in texts]
    return {"words": list(known), "of": of}


def _columns(numbers: Iterable[Numbers]) -> dict[str, Any]:
    rounded = [[None if n is None else float(f"{n:.{DIGITS}g}") for n in each] for each in numbers]
    return dict(zip(("values", "low", "high"), zip(*rounded, strict=True), strict=True))


def _as_json(verdict: Verdict, index: Mapping[str, int]) -> dict[str, Any]:
    found, cell = verdict.difference, verdict.difference.fast
    names = ("what", "model", "kernel", "link", "recomputed", "gpu", "campaign")
    where = ", ".join(filter(None, (PICKERS[name][1](cell) for name in names)))
    return {
        "text": shown(verdict.text, MAX_TEXT),
        "where": shown(f"{where}; {found.grade.why}", MAX_TEXT),
        "mark": found.grade.words,
        "weak": int(found.grade.is_weak),
        "bold": int(verdict.is_decided),
        "cells": [index[found.fast.cell_id], index[found.slow.cell_id]],
    }
