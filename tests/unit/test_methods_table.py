"""The support matrix: asked of the methods themselves, the same whatever is installed."""

import pytest

from sp_bench import hardware, methods
from sp_bench.look import methods_table
from sp_bench.look.methods_table import HEADS, SP_SIZES, Support

MHA, GQA, MQA = HEADS.values()


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str | None], Support]:
    return {(each.name, each.variant): each for each in methods_table.our_methods()}


def test_there_is_a_line_for_each_method_and_variant(found):
    assert [name for name, _ in found] == sorted((name for name, _ in found), key=methods.NAMES.index)
    assert {name for name, _ in found} == set(methods.NAMES)
    assert [variant for name, variant in found if name == "torch_context_parallel"] == ["allgather", "alltoall"]
    cells = [
        line.split("|")[1:3] for line in methods_table.table(list(found.values())).splitlines()[2 : 2 + len(found)]
    ]
    assert [(name.strip(), variant.strip() or None) for name, variant in cells] == list(found)


def test_what_it_says_of_our_methods(found):
    assert found["single", None].sp_sizes(MQA) == [1]
    assert found["ulysses", None].sp_sizes(MQA) == [1, 2, 4, 8, 16]
    assert found["ulysses", None].layouts(causal=True) == ["contiguous"]
    ring = found["ring", None]
    assert all(ring.sp_sizes(heads) == list(SP_SIZES) for heads in HEADS.values())
    assert ring.layouts(causal=False) == ["contiguous", "zigzag", "striped"]
    assert ring.refusal is None
    assert all(found[name, None].on_cpu for name in ("single", "ulysses", "ring", "all_gather", "usp"))


def test_usp_splits_with_the_best_of_its_degrees_and_not_that_of_its_file_alone(found):
    assert found["usp", None].sp_sizes(MHA) == list(SP_SIZES)


def test_what_it_says_of_libraries(found):
    assert found["deepspeed_ulysses", None].sp_sizes(GQA) == [1, 2, 3, 4, 8]
    assert found["deepspeed_ulysses", None].on_cpu
    ring = found["ring_flash_attn", None]
    assert (ring.kernels, ring.on_cpu) == (["flash_attn"], False)
    assert (len(ring.layouts(causal=True)), ring.layouts(causal=False)) == (3, ["contiguous"])
    assert "sends dK/dV to itself on sp_size=1" in str(ring.refusal)


@pytest.mark.parametrize("installed", [{}, {"ring-flash-attn": "9", "transformers": "9"}])
def test_the_table_is_the_same_whatever_is_installed_and_what_is_missing_is_told_apart(monkeypatch, installed, found):
    monkeypatch.setattr(hardware, "package_versions", lambda: installed)
    again = methods_table.of_variant("ring_flash_attn", None)
    assert again == found["ring_flash_attn", None]
    assert (again.missing_library is None) == bool(installed)
    assert installed or "needs ring-flash-attn and transformers: pip install" in str(again.missing_library)
    assert not any("pip install" in str(each.refusal) for each in found.values())


def test_a_library_assumed_to_be_installed_is_so_for_the_question_only(monkeypatch):
    monkeypatch.setattr(hardware, "package_versions", dict)
    with hardware.as_if_installed():
        assert methods.missing_library_reason("yunchang", "yunchang") is None
    assert methods.missing_library_reason("yunchang", "yunchang") is not None
