"""The page: cells, figures and words into one self-contained HTML file. Jinja escapes every value."""

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

import jinja2
import pandas as pd

from sp_bench.report.cells import Cell, baseline, listed
from sp_bench.report.fabric_model import foremost, places
from sp_bench.report.figures.drawings import Drawing
from sp_bench.report.formats import MISSING, counted, in_bytes, number, whole
from sp_bench.report.page.parts import Section
from sp_bench.report.page.verdict import Verdict
from sp_bench.report.selection import Selection

MAX_REASON = 2000  # characters of a reason; the row holds the rest
_CAPTION = (
    "One line a cell; open a method for its rows, errors and phases. Memory: {memory}, largest rank. Speed-up: step "
    "time of single on one rank at the same seq_len over this step time (strong scaling)."
)
_FLOPS = " Attention TFLOP/s: causal pairs only, forward 1 and backward 2.5."
_MEMORY = {"max_peak_allocated_bytes": "allocated on the device", "max_peak_host_bytes": "host, resident set"}


def render(
    selection: Selection,
    cells: Sequence[Cell],
    words: Verdict,
    drawings: Sequence[Drawing],
    undrawn: Sequence[str],
    sections: Sequence[Section],
) -> str:
    template = files("sp_bench.report.page").joinpath("page.html.jinja").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    rows = selection.rows
    return environment.from_string(template).render(
        title=f"sp-bench: {', '.join(sorted(set(rows['folder']))) or 'no rows'}",
        words=words,
        drawings=drawings,
        sections=sections,
        undrawn=undrawn,
        tables=_tables(cells),
        left_out=_left_out(selection),
        failures=[_failure(cell, row) for cell in cells for row in cell.rows if row["status"] != "ok"],
        problems=selection.problems,
        provenance=_provenance(selection),
        missing=MISSING,
    )


def _steps(cells: Sequence[Cell]) -> list[Cell]:
    """Messages alone have a section of their own."""
    return [cell for cell in cells if cell.asked["workload"] != "collective"]


def _tables(cells: Sequence[Cell]) -> list[Mapping[str, Any]]:
    """Those of slower fabrics, which the section on fabrics compares, are opened by the reader."""
    first = {cell.setting for cell in foremost(cells, places(cells))}
    steps = groupby(_steps(cells), key=lambda c: c.setting)
    return [_table(setting, list(group), setting not in first) for setting, group in steps]


def _table(setting: str, cells: Sequence[Cell], folded: bool) -> Mapping[str, Any]:
    kinds = {c.memory_column for c in cells if c.memory_column}
    in_flops = any(c.attention_flops_per_step for c in cells)
    memory = " or ".join(sorted(_MEMORY[kind] for kind in kinds)) or "not known"
    return {
        "setting": setting,
        "folded": folded,
        "processor": cells[0].processor,
        "flops": in_flops,
        "caption": _CAPTION.format(memory=memory) + (_FLOPS if in_flops else ""),
        "lines": [_line(cell, cells) for cell in cells],
    }


def _line(cell: Cell, cells: Sequence[Cell]) -> Mapping[str, Any]:
    ms, interval, comm = cell.median_step_ms, cell.interval_ms, cell.communication
    start = baseline(cell, cells)
    speed_up = start.median_step_ms / ms if start and start.median_step_ms and ms else None
    return {
        "series": cell.series,
        "sp_size": whole(cell.asked["sp_size"]),
        "degrees": " x ".join(whole(cell.asked[name]) for name in ("ulysses_degree", "ring_degree")),
        "seq_len": whole(cell.asked["seq_len"]),
        "replicates": f"{len(cell.step_ms)} of {len(cell.rows)}",
        "statuses": " ".join(status for status in cell.statuses if status != "ok"),
        "flags": ", ".join(sorted({str(flag) for row in cell.rows for flag in listed(row["flags"])})),
        "throttled": cell.throttle_note,
        "step_ms": number(ms),
        "interval": f"[{number(interval.low)}, {number(interval.high)}]" if interval else "",
        "coverage": f"coverage of the interval: {interval.coverage:.1%}" if interval else "",
        "tokens": number(cell.rate(ms, per_rank=False) if ms else None),
        "tokens_per_rank": number(cell.rate(ms, per_rank=True) if ms else None),
        "tflops": number(cell.attention_tflops(ms) if ms else None),
        "speed_up": MISSING if speed_up is None else f"{speed_up:.2f}x",
        "mfu": MISSING if cell.mfu is None else f"{cell.mfu:.1%}",
        "memory": in_bytes(cell.median_memory_bytes),
        "predicted": in_bytes(comm.predicted_bytes),
        "counted": in_bytes(comm.counted_bytes),
        "exact": f"{whole(comm.predicted_bytes)} B predicted, {whole(comm.counted_bytes)} B counted",
        "sign": {True: "=", False: "≠", None: ""}[comm.equal],
        "phases": [
            f"{phase}: {in_bytes(predicted)} predicted, {in_bytes(count)} counted"
            for phase, (predicted, count) in comm.phases.items()
        ],
        "worst": _worst_error(cell),
        "errors": [
            f"{name}: {error:.1e}" + (f" of {budget:.1e}" if budget else "")
            for name, (error, budget) in cell.errors.items()
        ],
        "rows": [
            f"{row['file']}: {row['status']}"
            + (f", {number(row['median_step_ms'])} ms" if row["median_step_ms"] else "")
            for row in cell.rows
        ],
    }


def _worst_error(cell: Cell) -> str:
    """The tensor that comes nearest to its budget, as a share of it."""
    shares = {name: error / budget for name, (error, budget) in cell.errors.items() if budget}
    if not shares:
        return MISSING
    name = max(shares, key=lambda n: shares[n])
    return f"{shares[name]:.2f} ({name})"


def _failure(cell: Cell, row: Mapping[str, Any]) -> Mapping[str, str]:
    reason = _printable(str(row["reason"] if row["reason"] is not None else "no reason given"))
    if len(reason) > MAX_REASON:
        reason = f"{reason[:MAX_REASON]} … ({len(reason) - MAX_REASON:,} more characters in the row)"
    where = f"{whole(cell.asked['seq_len'])} tokens, sp_size {whole(cell.asked['sp_size'])}"
    site = f" ({row['oom_site']})" if row["oom_site"] is not None else ""
    return {
        "status": f"{row['status']}{site}",
        "phase": str(row["phase"] or MISSING),
        "what": f"{cell.series}, {where}",
        "setting": cell.setting,
        "reason": reason,
        "file": row["file"],
    }


def _printable(text: str) -> str:
    """Without terminal escapes and control characters, which HTML does not allow."""
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    )


def _left_out(selection: Selection) -> list[str]:
    lines = [
        f"{counted(rows, 'row')} of env_id {env_id}: another environment, never pooled with this one"
        for env_id, rows in selection.left_out.items()
    ]
    if selection.num_superseded:
        lines.append(f"{counted(selection.num_superseded, 'earlier attempt')} of trials whose last attempt counts")
    return lines


def _provenance(selection: Selection) -> list[tuple[str, str]]:
    """(what, its values over the rows). More than one value of a thing is shown as such."""
    rows = selection.rows
    environments = [e for e in rows["environment"] if isinstance(e, dict)]
    statuses = ", ".join(f"{n:,} {status}" for status, n in Counter(map(str, rows["status"])).most_common())
    started = rows["started_at"].dropna()
    facts = [
        ("campaigns", _values(rows["folder"])),
        ("rows", f"{selection.num_read:,} read, {len(rows):,} used ({statuses or 'none'})"),
        ("env_id", selection.env_id or MISSING),
        (
            "started",
            f"{started.min():%Y-%m-%d %H:%M} to {started.max():%Y-%m-%d %H:%M} UTC" if len(started) else MISSING,
        ),
        ("git", _values(_commit(sha, dirty) for sha, dirty in zip(rows["git_sha"], rows["git_dirty"], strict=True))),
        ("schema", _values(rows["schema_version"])),
    ]
    named = ("hostname", "cpu", "cpu_cores", "driver", "cuda", "cudnn", "nccl", "process_group", "python", "topology")
    facts += [(name.replace("_", " "), _values(e[name] for e in environments)) for name in named]
    facts.append(("devices", _values(_multiset(e["device_names"]) for e in environments)))
    for name, column in (("libraries", "packages"), ("variables", "env")):
        pairs = (f"{key} {value}" for e in environments for key, value in listed(e[column]))
        facts.append((name, _values(pairs)))
    return [(name, value) for name, value in facts if value]


def _values(values: Any) -> str:
    """Distinct known values in order; empty without any."""
    return ", ".join(sorted({_printable(str(value)) for value in values if value is not None and value is not pd.NA}))


def _commit(sha: Any, dirty: Any) -> str | None:
    if not isinstance(sha, str):
        return None
    return f"{sha[:12]} with uncommitted changes" if dirty is True else sha[:12]


def _multiset(names: Any) -> str | None:
    present = Counter(str(name) for name in listed(names))
    return " + ".join(f"{n} x {name}" for name, n in sorted(present.items())) or None
