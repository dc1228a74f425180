"""seq_len=max: the search for the longest sequence that fits, on edges that are made up."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.planning.search import Course, Edge, Probe, Search, next_step, probes_ahead, so_far
from sp_bench.planning.settings import SearchConfig

SETTINGS = SearchConfig(resolution=0.02, max_probes=40, start=None, longest=None)


def search(
    status: Callable[[Probe], str],
    guess: int,
    multiple: int = 4,
    settings: SearchConfig = SETTINGS,
    known: Mapping[Probe, str] = {},
    *,
    fit: bool = True,
    shortest: int = 0,
) -> tuple[Edge, dict[Probe, str]]:
    """Where the search ends, and the probes that it took."""
    course, found = Course(guess, multiple, shortest or multiple, settings, fit), dict(known)
    while not isinstance(step := next_step(found, course, len(known)), Edge):
        assert step not in found
        assert step.seq_len % multiple == 0
        found[step] = status(step)
    return step, {probe: each for probe, each in found.items() if probe not in known}


def up_to(longest: int) -> Callable[[Probe], str]:
    return lambda probe: "ok" if probe.seq_len <= longest else "oom"


@given(
    longest=st.integers(64, 2**24),
    guess=st.integers(1, 2**24),
    multiple=st.sampled_from([1, 2, 6, 16]),
    resolution=st.sampled_from([0.01, 0.02, 0.04, 0.2]),
)
def test_a_sharp_edge_is_bracketed_and_both_ends_are_tried_twice(longest, guess, multiple, resolution):
    settings = SearchConfig(resolution=resolution, max_probes=60, start=None, longest=None)
    edge, found = search(up_to(longest), guess, multiple, settings)
    assert edge.fits is not None
    assert edge.fails is not None
    assert edge.fits <= longest < edge.fails
    assert edge.fails <= max(edge.fits * (1 + resolution), edge.fits + multiple)
    assert {Probe(edge.fits, 1, confirming=True), Probe(edge.fails, 1)} <= found.keys()
    assert any(probe.seq_len > edge.fails for probe in found)
    assert edge.note == ""


@given(error=st.floats(-0.024, 0.024), longest=st.integers(20_000, 2_000_000))  # as wrong as the memory model was
def test_from_a_good_guess_five_probes_are_enough(error, longest):
    _, found = search(up_to(longest), round(longest * (1 + error)), 16, SearchConfig(0.04, 40, None, None))
    assert len(found) <= 5


@given(longest=st.integers(64, 2**22), guess=st.integers(1, 2**22), stopped=st.integers(0, 12))
def test_a_search_that_was_killed_goes_on_from_what_is_known(longest, guess, stopped):
    edge, found = search(up_to(longest), guess)
    known = dict(list(found.items())[:stopped])
    while not isinstance(step := next_step(known, Course(guess, 4, 4, SETTINGS, True)), Edge):
        known[step] = up_to(longest)(step)
    assert (step, known) == (edge, found)


def test_a_length_that_runs_at_times_does_not_fit():
    edge, found = search(lambda p: "oom" if p.seq_len > 8000 or (p.seq_len > 7800 and p.replicate) else "ok", 8000)
    assert edge.fits is not None
    assert edge.fits <= 7800
    assert all(found[probe] == "ok" for probe in found if probe.seq_len == edge.fits)


def test_an_end_that_was_out_of_memory_once_is_told_of():
    edge, _ = search(lambda p: "oom" if p.seq_len > 8000 and not p.replicate else "ok", 8000)
    assert "ran at times" in edge.note


def test_a_longer_length_that_runs_moves_the_search_up_and_is_told_of():
    edge, _ = search(lambda p: "oom" if 8000 < p.seq_len < 8500 or p.seq_len > 12_000 else "ok", 8000)
    assert edge.fits is not None
    assert edge.fits >= 8500
    assert "was out of memory" in edge.note


def test_where_nothing_fits_or_all_does_the_search_ends():
    assert search(up_to(0), 4096)[0] == Edge(None, 4)
    edge, found = search(up_to(0), 0, 1, shortest=2)
    assert (edge, [probe.seq_len for probe in found]) == (Edge(None, 2), [2])
    edge, found = search(up_to(2**40), 4096)
    assert edge.fails is None
    assert len(found) <= SETTINGS.max_probes


@pytest.mark.parametrize("status", ["error", "incorrect", "timeout", "unsupported", "preempted"])
def test_what_is_no_question_of_memory_ends_it(status):
    edge, found = search(lambda p: status if p.seq_len > 5000 else "ok", 4096)
    assert edge.note.endswith(f"tokens ended as {status}")
    assert list(found.values()).count(status) == 1


def test_nothing_beyond_the_longest_is_tried():
    settings = SearchConfig(resolution=0.02, max_probes=40, start=None, longest=10_001)
    edge, found = search(up_to(2**40), 4096, settings=settings)
    assert edge == Edge(10_000, None, "nothing beyond 10,000 was tried")
    assert max(found).seq_len == 10_000
    assert max(search(up_to(9_990), 50_000, settings=settings)[1]).seq_len <= 10_000


@pytest.mark.parametrize("packing", [{"fixed": 128}, {"lognormal": 128}])
def test_a_search_over_packs_ends_where_a_pack_would_have_too_many_documents(make_config, packing):
    ((kind, document_len),) = packing.items()
    options = {"workload__packing": kind, "workload__document_len": document_len, "seq_len": 4096}
    step = Search(make_config(**options | ({"workload__document_sigma": 1.0} if kind == "lognormal" else {})))
    found: dict[Probe, str] = {}
    while isinstance(probe := next_step(found, step.course(3000, SETTINGS)), Probe):
        found[probe] = "ok"
        assert len(step.at(probe.seq_len).documents(probe.seq_len)) <= 1024
    assert probe == Edge(step.longest, None, f"nothing beyond {step.longest:,} was tried")
    assert step.longest > 65_536


def test_it_stops_after_so_many_probes():
    edge, found = search(up_to(10**6), 1000, settings=SearchConfig(0.02, 5, None, None))
    assert len(found) == 5
    assert "max_probes=5" in edge.note


def test_a_longest_length_whose_whole_step_is_refused_fits_and_says_so():
    edge, found = search(lambda p: "unsupported" if p.confirming else up_to(8000)(p), 8000)
    assert edge.fits is not None
    assert found[Probe(edge.fits, 1, confirming=True)] == "unsupported"
    assert edge.note == "fit only: the whole step cannot run here"


def test_where_the_whole_step_does_not_fit_the_longest_that_does_is_searched_for():
    edge, found = search(lambda p: up_to(7000 if p.confirming else 8000)(p), 8000)
    assert edge.fits is not None
    assert edge.fits <= 7000
    assert found[Probe(edge.fits, 1, confirming=True)] == "ok"


def test_a_whole_step_that_is_out_of_memory_where_fit_was_not_is_told_as_that():
    edge, found = search(lambda p: up_to(7900 if p.confirming else 8000)(p), 7990)
    assert edge.fits is not None
    assert edge.fits <= 7900
    assert edge.note == f"{edge.fails:,} fits without attention, and a whole step does not"
    assert Probe(edge.fails or 0, 1) not in found  # that it fits without attention is known


def test_a_row_of_a_whole_step_that_was_out_of_memory_is_taken_as_a_probe_of_one_is():
    known = {Probe(100_032, 0, confirming=True): "oom", Probe(99_008, 0, confirming=True): "ok"}
    edge, found = search(up_to(101_000), 100_000, known=known)
    assert (edge.fits, edge.fails, edge.note) == (99_008, 100_032, "")
    assert Probe(100_032, 1) not in found
    edge, found = search(up_to(101_000), 100_000, known=known | {Probe(100_032, 0): "ok"})
    assert edge.note == "100,032 fits without attention, and a whole step does not"
    assert Probe(100_032, 1) not in found
    at_times = known | {Probe(100_032, 0): "ok", Probe(100_032, 1, confirming=True): "ok"}
    assert search(up_to(101_000), 100_000, known=at_times)[0].note == "100,032 ran at times"


def test_a_whole_step_that_takes_too_long_leaves_the_bracket_fit_only():
    edge, found = search(lambda p: "timeout" if p.confirming else up_to(8000)(p), 8000)
    assert edge.note == "fit only: the whole step did not end in time"
    assert Probe(edge.fails or 0, 1) in found


def test_where_nothing_was_tried_that_could_fit_the_words_say_so():
    assert Edge(None, None).words == "[nothing that fits was tried, nothing ran out of memory]"
    assert Edge(None, 4).words == "[nothing fits, 4 do not]"


ROWS = st.lists(st.tuples(st.integers(1, 2**20), st.integers(0, 2)), max_size=8)  # units of length and replicates


@given(longest=st.integers(64, 2**22), guess=st.integers(1, 2**22), rows=ROWS, coarse=st.sampled_from([0.02, 0.1, 0.3]))
def test_rows_of_other_lengths_are_where_a_search_begins(longest, guess, rows, coarse):
    """Of a list of lengths, and of an earlier search with another resolution, start and budget."""
    listed = {probe: up_to(longest)(probe) for probe in (Probe(4 * unit, replicate) for unit, replicate in rows)}
    earlier = search(up_to(longest), 2 * guess, settings=SearchConfig(coarse, 3, None, None))[1]
    known = listed | earlier
    before = so_far(known)
    edge, tried = search(up_to(longest), guess, known=known)
    assert edge.fits is not None
    assert edge.fails is not None
    assert edge.fits <= longest < edge.fails
    assert edge.fails <= max(edge.fits * 1.02, edge.fits + 4)
    assert {Probe(edge.fits, 1, confirming=True), Probe(edge.fails, 1)} <= known.keys() | tried.keys()
    assert edge.note == ""
    within = [probe for probe in tried if (before.fits or 0) <= probe.seq_len <= (before.fails or 2**40)]
    assert len(tried) - len(within) <= 1  # the one above


def test_a_search_with_another_resolution_begins_at_the_bracket_of_the_first():
    first, found = search(up_to(100_000), 97_000, settings=SearchConfig(0.1, 40, None, None))
    assert (first.fits, first.fails) == (96_256, 104_448)
    edge, more = search(up_to(100_000), 97_000, known=found)
    assert 0.98 * (edge.fails or 0) <= (edge.fits or 0) <= 100_000 < (edge.fails or 0)
    assert all(96_256 < probe.seq_len < 104_448 for probe in more)
    assert len(more) == 6  # four lengths, then both ends again
    assert search(up_to(100_000), 3000, settings=SearchConfig(0.02, 1, 3000, None), known=found | more) == (edge, {})


def test_a_row_far_away_leaves_a_good_guess_as_good_as_it_is():
    known = {Probe(4096, 0): "ok", Probe(8192, 0): "ok", Probe(2**20, 0): "oom"}
    edge, found = search(up_to(400_000), 396_000, settings=SearchConfig(0.04, 40, None, None), known=known)
    assert edge.note == ""
    assert len(found) == 4  # that something longer does not fit is known


def test_rows_that_contradict_each_other_are_taken_as_those_of_one_search_are():
    at_times = {Probe(8000, 0): "ok", Probe(8000, 2): "oom"}
    edge, found = search(up_to(8000), 7900, known=at_times)
    assert edge.fails == 8000
    assert "8,000 ran at times" in edge.note
    assert Probe(edge.fits or 0, 1, confirming=True) in found
    edge, _ = search(up_to(12_000), 8000, known={Probe(6000, 0): "oom", Probe(9000, 0): "ok"})
    assert edge.fits is not None
    assert edge.fits > 11_000
    assert edge.note == "6,000 was out of memory"


def test_rows_beyond_the_longest_are_known_and_nothing_is_tried_there():
    settings = SearchConfig(0.02, 40, None, 10_000)
    edge, found = search(up_to(2**40), 4096, settings=settings, known={Probe(20_000, 0): "oom"})
    assert edge == Edge(10_000, 20_000, "this search tried no length beyond 10,000", ended=False)
    assert max(found).seq_len == 10_000
    edge, found = search(up_to(2**40), 4096, settings=settings, known={Probe(20_000, 0): "ok"})
    assert (edge, found) == (Edge(20_000, None, "nothing beyond 20,000 was tried"), {})


def test_an_end_beyond_the_longest_that_was_not_tried_twice_leaves_the_search_open():
    settings, known = SearchConfig(0.02, 40, None, 50_000), {Probe(49_984, 0): "ok", Probe(60_000, 0): "oom"}
    edge, _ = search(up_to(55_000), 50_000, 64, settings, known)
    assert edge == Edge(49_984, 60_000, "this search tried no length beyond 49,984", ended=False)
    edge, _ = search(up_to(55_000), 50_000, 64, settings, known | {Probe(60_000, 1): "oom"})
    assert edge.ended


def test_rows_that_are_there_take_nothing_of_the_budget():
    known = search(up_to(100_000), 50_000)[1]
    edge, found = search(up_to(100_000), 50_000, settings=SearchConfig(0.001, 3, None, None), known=known)
    assert len(found) == 3
    assert "max_probes=3" in edge.note
    assert not edge.ended


def test_without_fit_each_probe_is_a_whole_step_and_one_that_fails_at_times_is_told_as_that():
    edge, _ = search(
        lambda p: "oom" if p.seq_len > 8000 or (p.seq_len > 7950 and p.replicate) else "ok", 8000, fit=False
    )
    assert edge.note == f"{edge.fails:,} ran at times"
    edge, found = search(lambda p: "timeout" if p.replicate else up_to(8000)(p), 8000, fit=False)
    assert edge.note.endswith("tokens ended as timeout")
    assert not any(probe.confirming for probe in found)


def test_the_probes_that_are_left_are_counted_as_if_nothing_longer_fitted():
    course = Course(8000, 4, 4, SETTINGS, True)
    _, found = search(up_to(8000), 8000)
    items = list(found.items())
    assert [len(probes_ahead(dict(items[:done]), course)) for done in range(6)] == [5, 4, 3, 2, 1, 0]
    assert len(probes_ahead(dict(items[:1]), Course(8000, 4, 4, SearchConfig(0.02, 3, None, None), True))) == 2
