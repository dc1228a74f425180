"""Which libraries compute linear attention under sequence parallelism: docs/METHODS.md's table, where a CPU can tell.

A tiny Qwen3-Next of transformers, whose gated delta rule is its own plain torch, on 2 gloo ranks in fp32, against one
process. `alone`: what the model gives if its linear layers begin anew with each rank's shard.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run
from test_windows_libraries import needs, relative
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

S = 64
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1,
         "mlp_only_layers": [0, 1, 2, 3], "layer_types": 3 * ["linear_attention"] + ["full_attention"]}  # fmt: skip
WRONG, SAME = 0.1, 1e-4  # relative errors: of another model, and of rounding
GATED_DELTA = "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet.forward"


def model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**SMALL)
    made = transformers.Qwen3NextForCausalLM._from_config(config, attn_implementation="sdpa").train()
    for layer in made.model.layers[:3]:  # states that reach over shards
        torch.nn.init.constant_(layer.linear_attn.A_log, -5.0)
    return made


def tokens() -> Tensor:
    return torch.randint(0, 64, (1, S), generator=torch.Generator().manual_seed(1))


def logits(of: Any, given: Tensor, places: Tensor) -> Tensor:
    with torch.no_grad():
        return of(given, position_ids=places, use_cache=False).logits


def by_shards(of: Any) -> Tensor:
    """The logits of a model whose linear layers begin anew in the middle of the sequence."""
    whole = type(of.model.layers[0].linear_attn).forward

    def alone(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        return torch.cat([whole(self, half, **options) for half in hidden_states.chunk(2, dim=1)], dim=1)

    with mock.patch(GATED_DELTA, alone):
        return logits(of, tokens(), torch.arange(S)[None])


def check_deepspeed(rank: int) -> None:
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
        UlyssesSPAttentionHF,
    )

    with mock.patch.object(deepspeed.ops, "__compatible_ops__", {}):  # else it builds a C++ extension for its messages
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    places = torch.arange(S)[None]
    right, alone, split = logits(model(), tokens(), places), by_shards(model()), model()
    UlyssesSPAttentionHF.register_with_transformers(
        split, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1, seq_length=S
    )
    mine = slice(rank * S // 2, (rank + 1) * S // 2)
    got = logits(split, tokens()[:, mine], places[:, mine])
    assert relative(got, alone[:, mine]) < SAME
    assert relative(got, right[:, mine]) < SAME if rank == 0 else relative(got, right[:, mine]) > WRONG


@needs("transformers", "accelerate", "deepspeed")
def test_deepspeeds_ulysses_computes_linear_layers_shard_by_shard_and_says_nothing() -> None:
    run(2, check_deepspeed)


@needs("transformers", "accelerate")
def test_accelerates_context_parallelism_refuses_linear_layers() -> None:
    from accelerate.big_modeling import _attach_context_parallel_hooks  # pyright: ignore[reportMissingImports]

    with pytest.raises(ValueError, match=r"does not support attention layers of type.*linear_attention"):
        _attach_context_parallel_hooks(model())


def check_torch(rank: int) -> None:
    """It intercepts scaled_dot_product_attention alone. A rank holds two runs of tokens far apart, in zigzag order, and
    the linear layer reads them as one."""
    layer, mesh = model().model.layers[0].linear_attn, init_device_mesh("cpu", (2,))
    whole = torch.randn(1, S, 32, generator=torch.Generator().manual_seed(2))
    runs = whole.chunk(4, dim=1)
    mine = torch.cat([runs[rank], runs[3 - rank]], dim=1)
    with torch.no_grad():
        want = layer(whole).chunk(4, dim=1)
        given = whole.clone()
        with context_parallel(mesh, buffers=[given], buffer_seq_dims=[1]):
            assert torch.equal(given, mine)
            got = layer(given)
    right = torch.cat([want[rank], want[3 - rank]], dim=1)
    assert relative(got, right) > 5 * WRONG
    with torch.no_grad():
        assert relative(got, layer(mine)) < SAME
    dist.barrier()


@needs("transformers")
def test_torchs_context_parallelism_leaves_linear_layers_as_they_are() -> None:
    run(2, check_torch)
