"""Our decoder under DeepSpeed's ZeRO-3, with any of our methods: what differs from fsdp2 is the engine alone.

DeepSpeed is not told of the sequence parallelism, so it averages gradients over all ranks; the loss is scaled by their
number, since ours are parts of one sum. They are reduced in fp32, as by fsdp2 and as DeepSpeed does under its own
sequence parallelism. With bfloat16 the fp32 copies of the parameters start from rounded values.
"""

from collections.abc import Callable, Sequence
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
from sp_bench.training.model import AttentionCall, Decoder
from sp_bench.training.train import Batch, StepResult

UNPREDICTED = zero3.UNPREDICTED
UNLABELLED = 0


def traffic(config: TrialConfig, padded_len: int) -> Traffic:
    return training_costs.unsharded_traffic(config, train.attention_traffic(config, padded_len))


def run(
    config: TrialConfig,
    texts: Sequence[Tensor],
    mesh: DeviceMesh,
    device: torch.device,
    tick: Callable[[], None],
    *,
    token_losses: bool,
) -> list[StepResult]:
    padded_len = train.padded_seq_len(config, texts[0].shape[1] - 1)
    with train.open_attention(config, padded_len, mesh) as attention, zero3.library(device) as deepspeed:
        engine = start(config, attention, deepspeed)
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
        parts = [self._accumulate(batch) for batch in batches]
        loss, losses = torch.stack([loss for loss, _ in parts]).mean(), torch.cat([each for _, each in parts])
        with ledger.phase("loss"):
            dist.all_reduce(loss)
        return StepResult(loss, zero3.grad_norm(self.engine, self.device), losses)

    def _accumulate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One micro-batch: this rank's part of its mean loss, and its tokens' losses [B,s]. DeepSpeed divides each loss
        by the number of micro-batches, and its step after the last of them is the only one that updates."""
        losses = cross_entropy.of_tokens(self.engine(batch.tokens, batch.positions), batch.labels)
        loss = losses.sum() / batch.num_valid_tokens
        self.engine.backward(loss * dist.get_world_size())
        self.engine.step()
        return loss.detach(), losses.detach()


def start(config: TrialConfig, attention: AttentionCall, deepspeed: Any) -> Any:
    """The trial's decoder at step 0, partitioned over all ranks."""
    settings = zero3.settings(config, communication_dtype="fp32")
    recompute = config.workload.activation_checkpointing == "full"
    with deepspeed.zero.Init(config_dict_or_path=settings):
        decoder = Decoder(config.model, attention, recompute=recompute)
    names = enumerate(decoder.named_parameters())
    zero3.initialise([(name, index, parameter) for index, (name, parameter) in names], config.seed)
    optimizer = zero3.make_optimizer(decoder, config)
    engine, *_ = deepspeed.initialize(model=decoder, optimizer=optimizer, config=settings)
    zero3.tag_phases(engine)
    return engine
