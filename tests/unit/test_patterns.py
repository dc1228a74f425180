"""Of which of our methods' kind each library's is: the declarations, held to the adapters, our methods and the docs."""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

from sp_bench import methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.costs import attention as attention_costs
from sp_bench.costs import patterns
from sp_bench.costs.patterns import KINDS, LIBRARIES, Degrees, Library, kind
from sp_bench.look import methods_table
from sp_bench.look.methods_table import Question
from sp_bench.methods import closed_forms

from .rows import asked_for

DOC = (Path(__file__).parents[2] / "docs" / "METHODS.md").read_text()
GQA = AttentionShape(1, 131_072, 32, 8, 128, True, "bfloat16")
MIB = 2**20
each_library = pytest.mark.parametrize(("name", "variant"), LIBRARIES)


@cache
def works(name: str, variant: str | None) -> list[Question]:
    """What a library can split, were it installed."""
    return list(dict.fromkeys(q._replace(kernel="") for q in methods_table.of_variant(name, variant).works))


def by_phase(traffic: attention_costs.Traffic) -> Mapping[str, Fraction]:
    phases = {"forward": Fraction(0), "backward": Fraction(0)}
    for (phase, _), size in traffic.items():
        phases[phase] += size
    return phases


def degrees_of(question: Question) -> Degrees:
    cut = methods.get(question.method.name).layout(question.method, question.sp_size)
    return Degrees(cut.ulysses_degree, cut.ring_degree)


def test_every_library_and_variant_is_declared_and_nothing_else() -> None:
    found = set()
    for name in methods.NAMES:
        method = methods.get(name)
        if method.IMPLEMENTATION != "sp_bench" and not hasattr(method, "GATED_DELTA"):  # a pattern sends q, k or v
            found |= {(name, v) for v in ([None] if isinstance(method.PRIMITIVE, str) else method.PRIMITIVE)}
    assert found == set(LIBRARIES)


@pytest.mark.parametrize("shape", [GQA, replace(GQA, dtype="float32", batch_size=3, num_kv_heads=2)])
@pytest.mark.parametrize("name", KINDS)
def test_a_pattern_is_our_method_with_its_default_options(name: patterns.Kind, shape: AttentionShape) -> None:
    for degree in (1, 2, 4, 8) if name == "usp" else (8,):
        method = replace(methods_table.default_options(name), ulysses_degree=degree if name == "usp" else None)
        cut = methods.get(name).layout(method, 8)
        split = Degrees(cut.ulysses_degree, cut.ring_degree)
        sent = patterns.closed_form(name, shape, split)
        assert sent == by_phase(closed_forms.traffic(name)(method, shape, 8))
        assert kind(name, None, split) == name


@each_library
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_library_sends_its_pattern_s_bytes_and_the_declared_differences(
    name: str, variant: str | None, dtype: str
) -> None:
    assert works(name, variant)
    for question in works(name, variant):
        shape, split = replace(question.shape, dtype=dtype), degrees_of(question)
        pattern = kind(name, variant, split)
        assert pattern is not None
        expected = dict(patterns.closed_form(pattern, shape, split))
        for more in patterns.differences(LIBRARIES[name, variant], shape, split).values():
            for phase, size in more.items():
                expected[phase] += size
        assert by_phase(closed_forms.traffic(name)(question.method, shape, question.sp_size)) == expected, question


@each_library
def test_a_library_that_replicates_no_kv_heads_refuses_more_ranks_than_heads(name: str, variant: str | None) -> None:
    library = LIBRARIES[name, variant]
    more = any(degrees_of(q).ulysses > q.shape.num_kv_heads for q in works(name, variant))
    assert more == library.replicates_kv


def test_a_usp_of_one_ring_rank_is_ulysses_and_of_one_ulysses_rank_a_ring() -> None:
    found = [kind("yunchang", "usp", split) for split in (Degrees(8, 1), Degrees(1, 8), Degrees(2, 4))]
    assert found == ["ulysses", "ring", "usp"]
    assert kind("torch_context_parallel", "alltoall", Degrees(1, 4)) == "ring"
    assert kind("single", None, Degrees(1, 1)) is None
    assert kind("a_newer_method", "x", Degrees(1, 2)) is None


def test_at_the_headline_shape_the_differences_are_these_mebibytes() -> None:
    def mebibytes(name: str, variant: str | None, split: Degrees) -> dict[str, float]:
        more = patterns.differences(LIBRARIES[name, variant], GQA, split)
        return {words: float(sum(sizes.values()) / MIB) for words, sizes in more.items()}

    all_the_way = "a rank's own dK/dV travel too, one hop more"
    assert mebibytes("ring_flash_attn", None, Degrees(1, 8)) == {"dK/dV travel in float32": 448, all_the_way: 128}
    assert mebibytes("deepspeed_ulysses_hf", None, Degrees(8, 1)) == {"position_ids are gathered in each call": 0.875}
    for name, variant in (("yunchang", "usp"), ("deepspeed_ulysses", None), ("transformer_engine", "a2a")):
        assert mebibytes(name, variant, Degrees(8, 1)) == {}


@pytest.mark.parametrize(
    ("changes", "travelling"),
    [
        ({"method": "ring_flash_attn"}, "float32"),
        ({"method": "ring_flash_attn_llama3"}, "input"),
        ({"method": "deepspeed_ulysses_hf"}, "input"),
        ({"method": "torch_context_parallel", "method__variant": "alltoall"}, "float32"),
        ({"method": "yunchang", "method__ulysses_degree": 2}, "float32"),
        ({"method": "yunchang", "method__ulysses_degree": 4}, "input"),
        ({"method": "ring", "method__dkv_dtype": "float32"}, "float32"),
        ({"method": "ulysses"}, None),
    ],
)
def test_a_row_says_what_dkv_travel_in_and_its_config_what_was_asked_for(make_config, changes, travelling) -> None:
    config = make_config(**changes, sp_size=4)
    columns = asked_for(config)
    assert columns["dkv_dtype"] == travelling
    assert ("dkv_dtype" in columns["config"]) == (config.method.dkv_dtype is not None)
    collective = make_config(**changes, sp_size=4, workload="collective")
    assert asked_for(collective)["dkv_dtype"] is None


def documented() -> dict[tuple[str, str | None], list[str]]:
    """The cells of the table in docs/METHODS.md after method and variant."""
    _, _, rest = DOC.partition("\n## What libraries do otherwise\n")
    section, _, _ = rest.partition("\n## ")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    return {(cells[0].strip("`"), cells[1] or None): cells[2:] for cells in lines[2:]}


def dkv_hops(library: Library) -> str:
    ranks = {"ring": "P", "usp": "R"}.get(library.kind)
    if library.own_dkv_travels:
        return ranks or "P"
    return f"{ranks}-1" if ranks else {"all_gather": "reduce-scatter"}.get(library.kind, "-")


def test_the_table_of_the_docs_says_what_is_declared() -> None:
    assert set(documented()) == set(LIBRARIES)
    for (name, variant), (*cells, copies) in documented().items():
        library = LIBRARIES[name, variant]
        replication = {True: "yes", False: "no"}[library.replicates_kv] if library.kind in ("ulysses", "usp") else "-"
        assert cells == [
            *(library.kind, methods.primitive(MethodConfig(name, variant=variant)), library.dkv_dtype),
            *(dkv_hops(library), replication, "position_ids" if library.gathers_positions else "-"),
        ], (name, variant)
        assert copies


@each_library
def test_the_docs_have_a_section_for_each_library(name: str, variant: str | None) -> None:
    assert f"\n## {name}\n" in DOC, variant
