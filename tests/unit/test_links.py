"""Which bytes go to other nodes: the closed form over groups."""

from fractions import Fraction

import pytest

from sp_bench.costs.links import far_share
from sp_bench.methods import closed_forms


@pytest.mark.parametrize(
    ("op", "members", "place", "share"),
    [
        ("send", [0, 1, 2, 3], 0, 0),
        ("send", [0, 1, 2, 3], 1, 1),
        ("send", [0, 1, 2, 3], 3, 1),  # the last goes back to the first
        ("all_to_all", [0, 1, 2, 3], 2, Fraction(2, 3)),
        ("all_to_all", [0, 2], 1, 1),
        ("all_gather", [2, 3], 0, 0),
        ("all_to_all", [1], 0, 0),  # a group of one sends nothing
    ],
)
def test_the_share_of_a_ranks_bytes_that_leaves_its_node_of_two(op, members, place, share):
    assert far_share(op, members, place, ranks_per_node=2) == share


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
@pytest.mark.parametrize("placement", ["ulysses_inner", "ring_inner"])
def test_what_leaves_a_node_is_at_most_all_and_of_one_node_nothing(make_config, num_nodes, placement):
    heads = {"model__num_heads": 8, "model__num_kv_heads": 8}
    options = {"method__ulysses_degree": 2, "method__placement": placement, "num_nodes": num_nodes}
    config = make_config(method="usp", sp_size=8, **heads, **options)
    traffic = closed_forms.attention_traffic(config, config.seq_len)
    total = sum(traffic.values())
    far = [closed_forms.between_nodes(config, traffic, rank) for rank in range(8)]
    assert all(0 <= each <= total for each in far)
    assert (sum(far) == 0) == (num_nodes == 1)


def test_the_placement_changes_what_goes_between_nodes(make_config):
    heads = {"model__num_heads": 8, "model__num_kv_heads": 8}

    def between(placement: str) -> Fraction:
        options = {"method__ulysses_degree": 4, "method__placement": placement, "num_nodes": 2}
        config = make_config(method="usp", sp_size=8, **heads, **options)
        traffic = closed_forms.attention_traffic(config, config.seq_len)
        return sum(closed_forms.between_nodes(config, traffic, rank) for rank in range(8))

    assert between("ulysses_inner") != between("ring_inner")


def test_what_has_no_closed_form_by_node_is_not_predicted(make_config):
    options = {"sp_size": 4, "num_nodes": 2}
    for method in ("ring", "double_ring"):
        training = make_config(method=method, workload="train_step", **options)
        assert closed_forms.between_nodes(training, closed_forms.attention_traffic(training, 2048), 0) is None


def by_rank(make_config, inner: int | None, **options) -> list[Fraction]:
    """The part of its bytes that each of 8 ranks on 2 nodes sends to the other node."""
    ring = {} if inner is None else {"method__inner_ring_degree": inner}
    config = make_config(method="ring" if inner is None else "double_ring", sp_size=8, num_nodes=2, **ring, **options)
    traffic = closed_forms.attention_traffic(config, config.seq_len)
    return [closed_forms.between_nodes(config, traffic, rank) / sum(traffic.values()) for rank in range(8)]


@pytest.mark.parametrize("options", [{}, {"workload__pass_kind": "forward"}, {"method__dkv_dtype": "float32"}])
def test_of_a_double_ring_only_the_hops_of_the_outer_ring_leave_a_node_of_its_size(make_config, options):
    """Of 7 hops one, that from window to window; all ranks share the link. One ring sends all through two ranks."""
    assert by_rank(make_config, 4, **options) == [Fraction(1, 7)] * 8
    # rings of 2, in windows 0 to 3: from window 1 to 2, and from 3 to 0
    assert by_rank(make_config, 2, **options) == [0, 0, Fraction(3, 7), Fraction(3, 7)] * 2


@pytest.mark.parametrize("inner", [1, 8])
def test_a_double_ring_of_one_ring_sends_between_nodes_what_the_ring_does(make_config, inner):
    assert by_rank(make_config, inner) == by_rank(make_config, None) == [0, 0, 0, 1] * 2
