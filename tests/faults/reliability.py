"""docs/RELIABILITY.md, written by the run that it tells of: `pytest -m faults --write-reliability`."""

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from expected import EXPECTED, MATRIX, RANKS, Cell

from sp_bench.rows import git
from sp_bench.testing import faults

# By file and name, the first that fits; with --write-reliability all of these count as marked `faults`.
SECTIONS = {
    "Fault matrix": r"faults/test_faults(?!.*(one_fault_of_each|trial_after_all))",  # which the matrix has, too
    "Logs": r"faults/test_logs",
    "Hostile input": r"test_hostile\.py|test_secrets|text_of_a_csv|a_hash_of_the_value|test_plain_file|test_odd_rows"
    r"|may_repeat_a_block|an_alias_inside|aliases_of_yaml|deep_nesting|is_a_pipe|a_pipe_is|whose_name_is_no_rows"
    r"|that_is_no_file_or_leads_out|limited_by_the_memory|stand_four_times",
    "Damage": r"damage|hand_edit_of|by_the_digest|a_copy_under_another",
    "Load": r"test_load|20_?000_rows|100_000_rows|grows_no_faster",
    "Disk": r"full_disk|disk_that|folder_that_is_gone|folder_deleted|folder_that_cannot_be_written",
    "Write protocol": r"test_protocol|_driver_killed_|killed_drivers|late_writer",
    "Concurrency": r"test_claims|two_drivers|another_one_runs|two_runs_of_one|by_one_run_at_a_time",
    "Lifetime": r"test_lifetime",
    "Clock": r"driver_that_was_stopped_reads|driver_was_stopped|process_that_is_stopped|polls_that_each|machines_clock",
    "Resume": r"ctrl_c|test_drivers|test_campaign\.py|second_run_does|machine_taken_away|python_that_cannot_start",
}
LIES, LIES_TEST = "Lies", r"lies/test_lies.*::test_a_lie_"  # a part of their own, after the rest
RELYING_TEST = "test_a_lie_told_by_a_trial_that_relies_on_an_honest_proof_ends_as_it_must"  # one of them
CLUSTER, CLUSTER_TEST = "Cluster", r"cluster/test_nodes.*::test_a_sweep_of_24_trials"  # after them
MATRIX_TEST = "test_every_fault_ends_as_written_down_and_the_next_trial_is_ok"
HEAD = (
    "Written by `pytest -m faults --write-reliability`: what was tried, how often, and what came of it. A run writes "
    "the sections that it tried; each says when and at which commit that was."
)
PACKAGES = ("torch", "numpy", "pyarrow", "hydra-core", "psutil", "hypothesis", "pytest")


@dataclass
class Outcome:
    """One test as it ended; `tried` counts the cases inside it."""

    section: str
    name: str  # without parameters
    passed: bool
    skipped: bool
    seconds: float
    tried: int
    message: str  # of the failure
    properties: dict[str, Any] = field(default_factory=dict)


class Reliability:
    """A pytest plugin: picks the tests, keeps what became of them, and writes it down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, Outcome] = {}
        self._start = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            if _section(item.nodeid):
                item.add_marker(pytest.mark.faults)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Where the test ran: what only that process knows travels with its report."""
        report: pytest.TestReport = yield  # type: ignore[misc]
        if _section(item.nodeid):
            if call.excinfo and str(call.excinfo.value):
                report.user_properties.append(("message", str(call.excinfo.value).splitlines()[0]))
            # hypothesis says after the test how many examples it made
            examples = re.findall(r"(\d+) passing", getattr(item, "hypothesis_statistics", ""))
            if examples:
                report.user_properties.append(("tried", sum(map(int, examples))))
        return report  # type: ignore[return-value]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Where the reports of all processes arrive."""
        section = _section(report.nodeid)
        properties = dict(report.user_properties)
        if section and (report.when == "call" or report.outcome != "passed"):
            self._outcomes[report.nodeid] = Outcome(
                section,
                report.nodeid.split("::")[-1].split("[")[0],
                report.passed,
                report.skipped,
                report.duration,
                int(properties.get("tried", 1)),
                str(properties.pop("message", "")),
                properties,
            )
        elif report.nodeid in self._outcomes:
            self._outcomes[report.nodeid].tried = int(properties.get("tried", 1))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._outcomes and not hasattr(session.config, "workerinput"):
            before = self._path.read_text() if self._path.exists() else ""
            self._path.write_text(renewed(before, self._outcomes, time.monotonic() - self._start))


def _section(nodeid: str) -> str | None:
    patterns = {LIES: LIES_TEST, CLUSTER: CLUSTER_TEST, **SECTIONS}
    return next((name for name, pattern in patterns.items() if re.search(pattern, nodeid)), None)


def renewed(before: str, outcomes: dict[str, Outcome], seconds: float) -> str:
    """The page `before`, with the sections that this run tried written anew. Others keep their words, and with them the
    commit that they are of."""
    intro, *old = before.split("\n## ")
    parts = {text.partition("\n")[0]: f"## {text.rstrip()}" for text in old}
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in intro.splitlines() if line.startswith("| ")}
    when = _when_and_where(seconds)
    for section in (*SECTIONS, LIES, CLUSTER):
        chosen = {key: o for key, o in outcomes.items() if o.section == section}
        if not chosen:
            continue
        if section == LIES:
            parts[section] = lies_part([*chosen.values()], when).rstrip()
        elif section == CLUSTER:
            parts[section] = cluster_part(next(iter(chosen.values())), when).rstrip()
        else:
            lines[section] = _summary(section, [*chosen.values()])
            matrix = {key: o for key, o in chosen.items() if o.name == MATRIX_TEST}
            beside = [o for o in chosen.values() if o.name != MATRIX_TEST]
            body = [*_matrix(matrix), "### Beside the matrix"] if section == "Fault matrix" else []
            parts[section] = "\n\n".join([f"## {section}", when, *body, _tests(beside), *_costs(beside)])
    table = [
        "| section | tests | cases tried | passed | failed | skipped | commit |",
        "|---|--:|--:|--:|--:|--:|---|",
        *(lines.get(section, f"| {section} |{' not run |' * 5}  |") for section in SECTIONS),
    ]
    written = (parts.get(section, f"## {section}\n\nNot run.") for section in SECTIONS)
    last = (parts[section] for section in (LIES, CLUSTER) if section in parts)
    return "\n\n".join(["# Reliability", HEAD, "\n".join(table), *written, *last]) + "\n"


def _when_and_where(seconds: float) -> str:
    code, dirty = git.state()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {seconds / 60:.0f} min; commit "
        f"{git.short(code or 'unknown', 12)}{' with uncommitted changes' if dirty else ''}; "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, "
        f"{versions}."
    )


def _summary(section: str, outcomes: Sequence[Outcome]) -> str:
    passed, skipped = sum(o.passed for o in outcomes), sum(o.skipped for o in outcomes)
    counts = (len(outcomes), sum(o.tried for o in outcomes), passed, len(outcomes) - passed - skipped, skipped)
    return (
        f"| {section} | {' | '.join(f'{count:,}' for count in counts)} | {git.short(git.state()[0] or 'unknown', 12)} |"
    )


def _tests(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "Not run."
    lines = ["| what is true | cases tried | outcome | seconds |", "|---|--:|---|--:|"]
    for name in dict.fromkeys(o.name for o in outcomes):
        chosen = [o for o in outcomes if o.name == name]
        bad = [o for o in chosen if not o.passed]
        failed = [o for o in bad if not o.skipped]
        outcome = f"{len(failed)} of {len(chosen)} failed: {_cell(failed[0].message)}" if failed else "holds"
        if bad and not failed:
            outcome = "skipped"
        words = name.removeprefix("test_").replace("_", " ")
        tried, seconds = sum(o.tried for o in chosen), sum(o.seconds for o in chosen)
        lines.append(f"| {words} | {tried:,} | {outcome} | {seconds:.1f} |")
    return "\n".join(lines)


def _costs(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What commands took that were held against a limit."""
    if costs := [o.properties["cost"] for o in outcomes if "cost" in o.properties]:
        lines = ["| of 100,000 packed rows | s of a core | limit | GB | limit |", "|---|--:|--:|--:|--:|"]
        for cost in costs:
            took, gigabytes = f"{cost['s']:.1f} | {cost['limit_s']:g}", f"{cost['gb']:.2f} | {cost['limit_gb']:g}"
            lines.append(f"| {cost['what']} | {took} | {gigabytes} |")
        yield "\n".join(lines)


def _cell(text: str) -> str:
    return text[:200].replace("|", r"\|")


def _matrix(outcomes: dict[str, Outcome]) -> Iterator[str]:
    by_cell = {key.split("[")[1].rstrip("]"): outcome for key, outcome in outcomes.items()}
    ran = [cell for cell in MATRIX if str(cell) in by_cell]
    as_expected = sum(by_cell[str(cell)].passed for cell in ran)
    followed = sum(by_cell[str(cell)].properties.get("next") == "ok" for cell in ran)
    yield (
        f"{len(EXPECTED)} kinds of fault x {len(RANKS)} choices of the two ranks x {len(faults.PHASES)} phases, each "
        "injected once into a real trial of two gloo ranks, one campaign for all. A cell is as expected if its "
        "status, site and reason are those of the first failure, not of its echo on the peer; the trial ended within "
        "its phase's deadline plus 10 s; and no process of its sessions, no lock, no claim and no temporary file was "
        "left. After each cell a trial without a fault ran in the same campaign.\n\n"
        f"**{as_expected} of {len(MATRIX)} cells ended as expected, {len(ran) - as_expected} otherwise, "
        f"{len(MATRIX) - len(ran)} were not run. The next trial was ok {followed} of {len(ran)} times.**"
    )
    yield "\n".join(_kinds(by_cell))
    yield "\n".join(_cells(by_cell))


def lies_part(outcomes: Sequence[Outcome], when: str) -> str:
    ran = [o for o in outcomes if not o.skipped and o.name != RELYING_TEST]
    relying = [o for o in outcomes if not o.skipped and o.name == RELYING_TEST]
    left_out = [o for o in outcomes if o.skipped]
    caught = sum(o.passed for o in ran)
    lines = ["| about | lie | trial | dtype | ended in | reason |", "|---|---|---|---|---|---|"]
    columns = ("group", "what", "trial", "dtype", "ranks")
    for o in sorted(ran, key=lambda o: [str(o.properties.get(name, "")) for name in columns]):
        told = {name: str(value) for name, value in o.properties.items()}
        where = "" if told.get("ranks") == "all" else f", on rank {told.get('ranks')}"
        words = " ".join(word for word in told.get("trial", "").split() if not word.startswith(("seq_len", "kernel")))
        status = told.get("status", "no row") if o.passed else f"**{told.get('status')}, not as expected**"
        reason = _cell(" ".join(told.get("reason", o.message).split())[:160])
        lines.append(
            f"| {told.get('group', '')} | {told.get('what', o.name)}{where} | {words} | {told.get('dtype', '')} "
            f"| {status} | {reason} |"
        )
    return "\n\n".join(
        [
            f"## {LIES}",
            "Written by `pytest -m faults tests/lies --write-reliability`. " + when,
            "Each lie is planted in the ranks of a real trial, which then computes, sends or reports something else "
            f"than it says. **{caught} of {len(ran)} ended with the status and the reason that they must.**"
            + (
                f" Told by a trial that relies on the proof of an honest one, {sum(o.passed for o in relying)} of "
                f"{len(relying)} ended with the status that they must."
                if relying
                else ""
            )
            + (f" {len(left_out)} were skipped: {left_out[0].message}." if left_out else ""),
            "\n".join(lines) + "\n",
        ]
    )


def cluster_part(outcome: Outcome, when: str) -> str:
    """What a sweep on a real Slurm of two nodes lived through."""
    parts = [
        f"## {CLUSTER}",
        "Written by `pytest -m faults tests/cluster -k 24_trials --write-reliability`. " + when,
    ]
    if outcome.skipped or not outcome.passed:
        return "\n\n".join([*parts, f"{'Skipped' if outcome.skipped else 'Failed'}: {_cell(outcome.message)}"]) + "\n"
    told = outcome.properties["cluster"]
    lines = ["| done to the job of a trial over both nodes | rows ok before | rows added until its ranks were gone |"]
    lines += ["|---|--:|---|"]
    for step in told["steps"]:
        left = ", ".join(f"{count} {status}" for status, count in sorted(step["left"].items())) or "none"
        lines.append(f"| {step['what']} | {step['ok_before']} | {left} |")
    others = ", ".join(f"{count} {status}" for status, count in sorted(told["rows"].items()) if status != "ok")
    return (
        "\n\n".join(
            [
                *parts,
                "`sp-bench submit` of 24 trials on a real Slurm of two nodes without GPUs, 12 of them over both nodes. "
                "After each blow other jobs went on; what was left then, the same `submit` submitted again.",
                "\n".join(lines),
                f"**{told['rows']['ok']} of 24 planned trials have exactly one row that is ok**, after "
                f"{told['submissions']} more submission{'s' * (told['submissions'] != 1)}. Rows of attempts that were "
                f"lost: {others or 'none'}. No row is doubled, and no driver, agent, rank or claim is left.",
            ]
        )
        + "\n"
    )


def _kinds(by_cell: dict[str, Outcome]) -> Iterator[str]:
    yield "| fault | must end in | as expected | ended at most s after the fault | reason, such as |"
    yield "|---|---|--:|--:|---|"
    for kind, expected in EXPECTED.items():
        chosen = [by_cell[str(cell)] for cell in MATRIX if cell.kind == kind and str(cell) in by_cell]
        must = f"{expected.status} ({expected.oom_site})" if expected.oom_site else expected.status
        seconds = max((o.properties["after_s"] for o in chosen if "after_s" in o.properties), default=None)
        told = next((o.properties["reason"] for o in chosen if o.properties.get("reason")), "")
        example = _cell(" ".join(told.split())[:120])
        took = "" if seconds is None else f"{seconds:.1f}"
        yield f"| {kind} | {must} | {sum(o.passed for o in chosen)} of {len(chosen)} | {took} | {example} |"


def _cells(by_cell: dict[str, Outcome]) -> Iterator[str]:
    yield f"| fault | ranks | {' | '.join(faults.PHASES)} |"
    yield "|---|---|" + "---|" * len(faults.PHASES)
    for kind in EXPECTED:
        for ranks in RANKS:
            entries = [_entry(by_cell.get(str(Cell(kind, ranks, phase)))) for phase in faults.PHASES]
            yield f"| {kind} | {ranks} | {' | '.join(entries)} |"


def _entry(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run"
    status = outcome.properties.get("status", "no row")
    return status if outcome.passed else f"**{status}, not as expected: {_cell(outcome.message)}**"
