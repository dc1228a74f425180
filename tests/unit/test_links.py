"""Which bytes go to other nodes: the closed form over groups."""

from fractions import Fraction

import pytest

from sp_bench import methods
from sp_bench.costs.links import far_share


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
    traffic = methods.attention_traffic(config, config.seq_len)
    total = sum(traffic.values())
    far = [methods.between_nodes(config, traffic, rank) for rank in range(8)]
    assert all(0 <= each <= total for each in far)
    assert (sum(far) == 0) == (num_nodes == 1)


def test_the_placement_changes_what_goes_between_nodes(make_config):
    heads = {"model__num_heads": 8, "model__num_kv_heads": 8}

    def between(placement: str) -> Fraction:
        options = {"method__ulysses_degree": 4, "method__placement": placement, "num_nodes": 2}
        config = make_config(method="usp", sp_size=8, **heads, **options)
        traffic = methods.attention_traffic(config, config.seq_len)
        return sum(methods.between_nodes(config, traffic, rank) for rank in range(8))

    assert between("ulysses_inner") != between("ring_inner")


def test_what_has_no_closed_form_by_node_is_not_predicted(make_config):
    options = {"sp_size": 4, "num_nodes": 2}
    double = make_config(method="double_ring", **options)
    assert methods.between_nodes(double, methods.attention_traffic(double, 2048), 0) is None
    training = make_config(method="ring", workload="train_step", **options)
    assert methods.between_nodes(training, methods.attention_traffic(training, 2048), 0) is None
