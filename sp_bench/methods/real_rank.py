"""Which rank of a world of one is there, and whether its time is that of the whole step."""

from sp_bench.attention.layouts import shares_of_ranks
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.attention import attention_forward_flops
from sp_bench.costs.work import projected_tokens
from sp_bench.methods import layout_of


def real_place(config: TrialConfig) -> int | None:
    """The rank of the world that is there; None: all are. By default the one that computes most attention, of equals
    the usual one; of states the last one, which puts the most together, or where a library makes none of the last
    tokens the one before it. For whether a ring fits, the last one, which holds most: in zigzag order it computes all
    its queries over half of each other shard's keys (costs/memory/rings.py)."""
    if config.world == "ranks" or config.real_rank is not None:
        return config.real_rank
    if config.model.attention == "gated_delta" or config.method.states:
        return config.world_size - (2 if config.method.name == "fla_context_parallel" else 1)
    if config.workload.fit and config.method.name in ("ring", "double_ring"):
        return config.sp_size - 1
    layout = layout_of(config)
    of_kinds = [
        [number * attention_forward_flops(shape) * share for share in shares_of_ranks(layout, shape)]
        for kind, number in config.kinds.items()
        for shape in [config.attention_shape(config.seq_len, kind)]
    ]
    work = [sum(of_rank) for of_rank in zip(*of_kinds, strict=True)]
    usual = config.usual_rank
    return usual if work[usual] == max(work) else work.index(max(work))


def is_lower_bound(config: TrialConfig) -> bool:
    """Whether the one rank of a world may have to wait for others, which compute more or at other times: its step takes
    at least as long as measured. Under a window the first ranks see less, and none waits for them."""
    if (place := real_place(config)) is None:
        return False
    layout = layout_of(config)
    for kind in config.kinds:
        shape = config.attention_shape(config.seq_len, kind)
        shares = shares_of_ranks(layout, shape)
        if len(set(shares)) > 1 and (
            shape.window is None or shape.documents or shares[place % config.sp_size] < max(shares)
        ):
            return True
        if shape.kv_lora_rank is not None:
            projected = [projected_tokens(config.method, shape, config.sp_size, rank) for rank in range(config.sp_size)]
            if projected[place % config.sp_size] < max(projected):
                return True
    return False
