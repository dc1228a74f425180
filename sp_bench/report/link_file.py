"""A file of conf/link from the `collective` rows of campaigns: how long one real rank's messages take."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from sp_bench.config.machine import require_link_file
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.rows import git, store

COLUMNS = (*("status", "workload", "primitive", "sp_size", "num_nodes", "fabric", "exchange"), *("curve", "git_sha"))
OPS = {"all_to_all": "all_to_all", "send_recv": "send", "all_gather": "all_gather"}  # primitive of a row -> of a link
LEAST_GROWTH = 1 / 3  # of a message's time, as a power of its size: what grows less waits for the host
Curve = dict[float, list[float]]  # bytes -> us of each row


def text(folders: Sequence[Path], path: Path) -> str:
    """The link file, named as `path` is.

    Raises:
        ConfigError: `link=` cannot have the file's name, rows are of several fabrics, or there are none.
        OSError: a campaign cannot be read.
    """
    require_link_file(path)
    rows = [(folder, row) for folder in folders for row in store.read(folder, COLUMNS)[0].to_pylist()]
    known = [(folder, row) for folder, row in rows if _is_known(row)]
    fabrics = sorted({str(row["fabric"]) for _, row in known})
    if len(fabrics) > 1:
        known = [(folder, row) for folder, row in known if row["fabric"] == path.stem]
    if not known:
        found = f"are of fabrics {', '.join(fabrics)}; name the file as one of them" if fabrics else (
            "have none of workload=collective; run one first: sp-bench run workload=collective "
            "method=ulysses,ring,all_gather --link FILE.yaml"
        )  # fmt: skip
        raise ConfigError(f"--link {shown(path)}: the rows {found}")
    near, far = _curves(known)
    sources = sorted({f"{folder.name} ({git.short(str(row['git_sha']))})" for folder, row in known})
    lines = [
        f"# Messages over fabric={known[0][1]['fabric']}: medians over steps of the slowest rank, from the",
        f"# `collective` rows of {', '.join(sources)}.",
        "# Shorter messages are left out: their time is the host's. Other collectives take what all_gather takes.",
        f"name: {path.stem}",
        *_section("inside", "`collective ranks` -> bytes that one rank sends off-rank : us", near),
        *_section("between", "`collective hosts` -> bytes that one network card sends : us", far),
    ]
    return "\n".join(lines) + "\n"


def _is_known(row: Mapping[str, Any]) -> bool:
    plain = row["exchange"] in (None, "collectives") and row["primitive"] in OPS
    return row["status"] == "ok" and row["workload"] == "collective" and plain and bool(row["curve"])


def _curves(known: Iterable[tuple[Path, Mapping[str, Any]]]) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """(inside a host, between hosts): `collective number` -> curve, of all rows."""
    near: dict[str, Curve] = {}
    far: dict[str, Curve] = {}
    for _, row in known:
        op, ranks, hosts = OPS[row["primitive"]], row["sp_size"], row["num_nodes"] or 1
        curve = (near if hosts == 1 else far).setdefault(f"{op} {ranks if hosts == 1 else hosts}", {})
        for point in row["curve"]:
            share = 1.0 if hosts == 1 else _far_share(op, ranks, ranks // hosts)
            curve.setdefault(share * point["message_bytes"], []).append(1e3 * point["ms"])
    return near, far


def _far_share(op: str, ranks: int, on_host: int) -> float:
    """The part of a rank's bytes that its network card sends, as a link model has it (costs/links.py)."""
    if op == "all_gather":
        return 1 / on_host
    return 1.0 if op == "send" else (ranks - on_host) / (ranks - 1)


def _section(name: str, about: str, curves: Mapping[str, Curve]) -> list[str]:
    """
    Raises:
        ConfigError: a curve has fewer than two points.
    """
    if not curves:
        return [f"{name}: {{}}"]
    lines = [f"{name}: # {about}"]
    for key, curve in sorted(curves.items()):
        kept = _of_the_link(sorted((size, median(times)) for size, times in curve.items()))
        if len(kept) < 2:
            raise ConfigError(f"{key}: only messages of one size take longer than the host; run larger ones too")
        lines.append(f'  {key}: "{" ".join(f"{size:.0f}:{round(us, 1):.10g}" for size, us in kept)}"')
    return lines


def _of_the_link(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """From the largest down, as long as larger messages take longer."""
    kept = list(points[-1:])
    for (size, us), (larger, longer) in reversed(list(pairwise(points))):
        if math.log(longer / us) < LEAST_GROWTH * math.log(larger / size):
            break
        kept.insert(0, (size, us))
    return kept
