"""Our decoder under DeepSpeed's ZeRO-3, with any of our methods. Only the engine differs from fsdp2.

DeepSpeed does not know of the sequence parallelism, and averages gradients over all ranks. Our losses are parts of one
sum, so the loss is multiplied by the number of ranks. Gradients are reduced in fp32, as in fsdp2, and as DeepSpeed does
under its own sequence parallelism. In bfloat16 trials the fp32 copies of the parameters start from rounded values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench.config.trial import TrialConfig
from sp_bench.costs import training as training_costs
from sp_bench.costs.attention import Traffic
from sp_bench.engines import zero3
from sp_bench.measure import ledger
from sp_bench.training import cross_entropy, train
from sp_bench.training.model import AttentionCall, Decoder, Keeping
from sp_bench.training.train import Batch, StepResult, Tick, Watch

UNPREDICTED = zero3.UNPREDICTED
UNLABELLED = 0


def traffic(config: TrialConfig, padded_len: int) -> Traffic:
    return training_costs.unsharded_traffic(config, train.attention_traffic(config, padded_len))


def run(
    config: TrialConfig,
    texts: Sequence[Tensor],
    mesh: DeviceMesh,
    device: torch.device,
    tick: Tick,
    *,
    token_losses: int,
    watch: Watch | None = None,
) -> list[StepResult]:
    padded_len = train.padded_seq_len(config, texts[0].shape[1] - 1)
    with train.open_attention(config, padded_len, mesh) as attention, zero3.library(config, device) as deepspeed:
        engine = start(config, attention, deepspeed)
        zero3.show(engine, dict(engine.module.named_parameters()), watch)
        batches = train.shard_batches(config, texts, attention.layout, mesh, device)
        results = train.run_steps(Training(engine, device).step, batches, tick)
        engine.destroy()
    return results


@dataclass(frozen=True)
class Training:
    """A DeepSpeed engine around our decoder."""

    engine: Any
    device: torch.device

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """One optimizer step on the micro-batches of this rank. Every rank of the world calls it."""
        num_valid_tokens = sum(batch.num_valid_tokens for batch in batches)
        losses = torch.cat([self._accumulate(batch, num_valid_tokens) for batch in batches])
        loss = losses.sum() / num_valid_tokens
        with ledger.phase("loss"):
            dist.all_reduce(loss)
        return StepResult(loss, zero3.grad_norm(self.engine, self.device), losses)

    def _accumulate(self, batch: Batch, num_valid_tokens: int) -> Tensor:
        """Forward and backward of one micro-batch. Returns the loss of each of its tokens [B,s], in nats.

        By default DeepSpeed divides each loss by the number of micro-batches, which would make a mean of their means.
        Its `step` is called after each of them, but only the last call of a step updates the parameters.
        """
        losses = cross_entropy.of_tokens(self.engine(batch.tokens, batch.positions), batch.labels)
        loss = losses.sum() / num_valid_tokens
        self.engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)
        self.engine.step()
        return losses.detach()


def start(config: TrialConfig, attention: AttentionCall, deepspeed: Any) -> Any:
    """A DeepSpeed engine around the trial's decoder with its initial values, partitioned over all ranks."""
    settings = zero3.settings(config, communication_dtype="fp32")
    keeping = Keeping(config.workload.activation_checkpointing or "none")
    with deepspeed.zero.Init(config_dict_or_path=settings):
        decoder = Decoder(config.model, attention, keeping)
    names = enumerate(decoder.named_parameters())
    zero3.initialise([(name, index, parameter) for index, (name, parameter) in names], config.seed)
    optimizer = zero3.make_optimizer(decoder, config)
    engine, *_ = deepspeed.initialize(model=decoder, optimizer=optimizer, config=settings)
    zero3.tag_phases(engine)
    return engine
