"""What the run writes of itself in docs/RELIABILITY.md."""

from expected import MATRIX
from reliability import CLUSTER, LIES, MATRIX_TEST, RELYING_TEST, SECTIONS, Outcome, renewed


def outcome(passed=True, tried=1, section="Fault matrix", name=MATRIX_TEST, **properties):
    message = "" if passed else "assert 'timeout' == 'error'"
    return Outcome(section, name, passed, False, 1.0, tried, message, properties)


def line(text: str, beginning: str) -> str:
    [found] = [line for line in text.splitlines() if line.startswith(beginning)]
    return found


def test_a_cell_that_ended_otherwise_is_counted_and_shown_with_what_it_was():
    right = {f"test[{cell}]": outcome(status=cell.expected.status, next="ok", after_s=2.0) for cell in MATRIX}
    wrong = {"test[exit-1-warmup]": outcome(passed=False, status="timeout", reason="init | late", after_s=9.0)}
    written = renewed("", right | wrong, 60)
    assert f"**{len(MATRIX) - 1} of {len(MATRIX)} cells ended as expected, 1 otherwise, 0 were not run." in written
    assert f"The next trial was ok {len(MATRIX) - 1} of {len(MATRIX)} times.**" in written
    assert line(written, "| exit | 1 |").split(" | ")[2:5] == [
        *("error", "error", "**timeout, not as expected: assert 'timeout' == 'error'**")
    ]
    assert line(written, "| exit | error |") == r"| exit | error | 14 of 15 | 9.0 | init \| late |"
    assert line(written, "| hang | all |") == "| hang | all | timeout | timeout | timeout | timeout | timeout |"


def test_what_was_not_run_is_said_to_be_so():
    written = renewed("", {"test[slow-0-init]": outcome(status="ok")}, 60)
    assert f"1 of {len(MATRIX)} cells ended as expected, 0 otherwise, {len(MATRIX) - 1} were not run" in written
    assert line(written, "| slow | 0 |") == "| slow | 0 | ok | not run | not run | not run | not run |"
    assert written.count("\n\nNot run.\n") == len(SECTIONS)


def test_cases_inside_a_test_and_its_parameters_are_counted_together():
    outcomes = {
        "a": outcome(section="Load", name="test_it_is_fast", tried=500),
        "b": outcome(section="Load", name="test_it_is_fast", tried=300),
        "c": outcome(section="Load", name="test_it_is_small", passed=False),
    }
    written = renewed("", outcomes, 60)
    assert "| it is fast | 800 | holds | 2.0 |" in written
    assert "| it is small | 1 | 1 of 1 failed: assert 'timeout' == 'error' | 1.0 |" in written
    assert line(written, "| Load |").startswith("| Load | 3 | 801 | 2 | 1 | 0 |")


def test_what_commands_cost_stands_beside_their_limits():
    cost = {"what": "load", "limit_s": 10, "s": 6.94, "limit_gb": 2, "gb": 1.271}
    test = outcome(section="Load", name="test_100_000_rows_cost_no_more", cost=cost)
    assert line(renewed("", {"a": test}, 60), "| load |") == "| load | 6.9 | 10 | 1.27 | 2 |"


def test_a_run_of_the_lies_alone_leaves_the_rest_of_the_page_as_it_is_and_the_other_way_round():
    told = {"group": "Attention", "what": "zeros", "ranks": "1", "trial": "method=ring seq_len=9", "dtype": "bfloat16"}
    lie = outcome(section=LIES, name="test_lie", status="incorrect", reason="a | b", **told)
    faults = {"test[slow-0-init]": outcome(status="ok")}
    relying = outcome(section=LIES, name=RELYING_TEST)
    alone = renewed("", faults, 60)
    both = renewed(alone, {"lie": lie, "relying": relying}, 60)
    assert both.startswith(alone.rstrip())
    assert "1 of 1 ended with the status and the reason" in both
    assert "relies on the proof of an honest one, 1 of 1 ended with the status" in both
    assert line(both, "| Attention |") == (
        r"| Attention | zeros, on rank 1 | method=ring | bfloat16 | incorrect | a \| b |"
    )
    again = renewed(both, faults, 60)
    assert again.count(f"## {LIES}") == 1
    assert line(again, "| slow | 0 |") == line(both, "| slow | 0 |")


def test_a_run_of_some_sections_leaves_the_others_with_their_commit(monkeypatch):
    before = renewed("", {"test[slow-0-init]": outcome(status="ok")}, 60)
    monkeypatch.setattr("reliability.git.state", lambda: ("abcdef" * 6, False))
    after = renewed(before, {"a": outcome(section="Load", name="test_it_is_fast")}, 60)
    assert line(after, "| Load |") == "| Load | 1 | 1 | 1 | 0 | 0 | abcdefabcdef |"
    for beginning in ("| Fault matrix |", "| slow | 0 |"):
        assert line(after, beginning) == line(before, beginning)
    assert after.count("commit abcdefabcdef;") == 1


def test_a_run_on_the_cluster_alone_has_a_part_of_its_own_at_the_end():
    steps = [
        {"what": "scancel", "ok_before": 4, "left": {"preempted": 1}},
        {"what": "kill", "ok_before": 9, "left": {}},
    ]
    told = {"steps": steps, "rows": {"ok": 24, "preempted": 1}, "submissions": 1}
    lie = outcome(section=LIES, name="test_lie", status="incorrect", group="Attention", what="zeros")
    before = renewed(renewed("", {"test[slow-0-init]": outcome(status="ok")}, 60), {"lie": lie}, 60)
    written = renewed(before, {"show": outcome(section=CLUSTER, name="test_show", cluster=told)}, 60)
    assert written.startswith(before)
    assert "| scancel | 4 | 1 preempted |\n| kill | 9 | none |\n" in written
    assert "**24 of 24 planned trials have exactly one row that is ok**, after 1 more submission." in written
    again = renewed(written, {"lie": lie}, 60)
    assert (again.count(f"## {CLUSTER}\n"), again.count(f"## {LIES}\n")) == (1, 1)


def test_no_host_is_named():
    import socket

    assert socket.gethostname() not in renewed("", {"test[slow-0-init]": outcome(status="ok")}, 60)
