"""A Hugging Face model under ZeRO-3 with DeepSpeed's `UlyssesSPAttentionHF`, in the training loop of Hugging Face's
post about Ulysses, https://huggingface.co/blog/ulysses-sp.

For each micro-batch the loop takes a batch from `UlyssesSPDataLoaderAdapter`, computes the weighted sum of the ranks'
losses (`deepspeed_sp_compute_loss`), and calls `engine.backward` and `engine.step`. DeepSpeed divides each loss by the
number of micro-batches, and updates after the last one. At every P-th micro-batch the adapter exchanges the tokens of
the P ranks of a sequence. That exchange and the adapter's copies are part of the step.

B sequences of a micro-batch, s local tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from sp_bench.config.trial import TrialConfig
from sp_bench.engines import hugging_face, zero3
from sp_bench.engines.libraries import ATTENTION
from sp_bench.measure import ledger
from sp_bench.training import cross_entropy, train
from sp_bench.training.train import StepResult, Tick, Watch

UNPREDICTED = zero3.UNPREDICTED
UNLABELLED = hugging_face.UNLABELLED
traffic = hugging_face.traffic


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
    seq_len = train.padded_seq_len(config, texts[0].shape[1] - 1)
    with zero3.library(config, device) as deepspeed, hugging_face.attention_registry(config):
        engine, mpu = start(config, seq_len, deepspeed)
        zero3.show(engine, hugging_face.named(config, engine.module), watch)
        training = Training(engine, config, device, token_losses)
        loaded, size = _micro_batches(texts, config, mpu, device), config.workload.num_micro_batches
        results = train.run_steps(training.step, (islice(loaded, size) for _ in texts), tick)
        engine.destroy()
    return hugging_face.averaged(results)


def start(config: TrialConfig, seq_len: int, deepspeed: Any) -> tuple[Any, Any]:
    """The DeepSpeed engine around the model with its initial values, and the mpu, the object that knows which ranks
    share a sequence (None for sp_size=1)."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
        UlyssesSPAttentionHF,
    )
    from transformers.integrations import HfDeepSpeedConfig  # pyright: ignore[reportMissingImports]

    settings = zero3.settings(config)
    announced = HfDeepSpeedConfig(settings)  # as long as this object lives, transformers builds models for ZeRO-3
    model = hugging_face.build(config, seq_len)
    del announced
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=ATTENTION[config.kernel.name],
        sequence_parallel_size=config.sp_size,
        micro_batch_size=config.batch_size,
        seq_length=seq_len,
        seq_length_is_variable=bool(config.engine.variable_seq_len),
    )
    if mpu is not None:
        hugging_face.tell_the_ledger(config)
    if config.workload.loss_tile_tokens is not None:
        model.forward = TiledLoss(model, config)
    if config.workload.activation_checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=hugging_face.checkpointing_options())
    model.train()
    optimizer = zero3.make_optimizer(model, config)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
    zero3.tag_phases(engine)
    return engine, mpu


@dataclass
class TiledLoss:
    """The forward of a Hugging Face model that computes logits and loss of some tokens at a time, by DeepSpeed's
    `TiledFusedLogitsLoss`, which computes the gradients of the hidden states and the head in the forward.

    It takes for granted that the loss's own gradient is 1: whatever else it is reaches the hidden states, and not the
    head. So nothing may scale the loss afterwards. It is here the loss of this rank's tokens, times P, over the number
    of labelled tokens of the P ranks and over that of micro-batches: ZeRO averages gradients over ranks, and adds those
    of micro-batches. The post's loop scales it, by `deepspeed_sp_compute_loss`.
    """

    model: Any
    config: TrialConfig

    def __call__(self, **batch: Tensor) -> tuple[Tensor, Tensor]:
        """The loss as above, and the loss of each local token [B,s], in nats."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
            TiledFusedLogitsLoss,
        )

        labels = hugging_face.shifted(batch)
        inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
        hidden = self.model.model(**inputs).last_hidden_state  # [B,s,h]
        scale, weight, losses = self._scale(labels), self.model.lm_head.weight, []
        tile_tokens = self.config.workload.loss_tile_tokens
        assert tile_tokens is not None

        def loss_of(head: Any, x: Tensor, y: Tensor) -> Tensor:
            # x [t,h], y [t], of the tokens of all sequences
            zero3.require_tile("loss_tile_tokens", tile_tokens, 1, x)
            each = cross_entropy.of_tokens(head(x)[None], y[None])
            losses.append(each.detach())
            return each.sum() * scale

        tiles = zero3.num_tiles(labels.numel(), tile_tokens)
        # A tied head's gradient waits for the embedding's: it may be reduced once.
        reduced_here = [] if self.config.model.tie_embeddings else [weight]
        weight.ds_grad_is_ready = False
        loss = TiledFusedLogitsLoss.apply(loss_of, self.model.lm_head, hidden, labels, None, tiles, reduced_here, "sum")
        weight.ds_grad_is_ready = True
        return loss, torch.cat(losses, dim=1).view_as(labels)

    def _scale(self, labels: Tensor) -> Tensor:
        """By which the sum of this rank's losses is multiplied."""
        number = (labels != cross_entropy.IGNORED).sum()
        if self.config.sp_size > 1:
            from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

            dist.all_reduce(number, group=groups._get_sequence_parallel_group())
        return self.config.sp_size / (number * self.config.workload.num_micro_batches)


def _micro_batches(
    texts: Sequence[Tensor], config: TrialConfig, mpu: Any, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """This rank's share of all micro-batches of all steps, on the device; each is loaded when it is asked for."""
    mine, places = hugging_face.distinct(hugging_face.texts_of(texts, config, dist.get_rank()))
    samples = [hugging_face.sample(text, config) for text in mine]
    loader: Any = DataLoader([samples[place] for place in places], batch_size=None)  # pyright: ignore[reportArgumentType]
    if mpu is not None:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
            UlyssesSPDataLoaderAdapter,
        )

        loader = UlyssesSPDataLoaderAdapter(
            loader,
            sp_rank=mpu.get_sequence_parallel_rank(),
            sp_group=mpu.get_sequence_parallel_group(),
            sp_world_size=mpu.get_sequence_parallel_world_size(),
            device=device,
        )
    loaded = iter(loader)
    for _ in range(len(texts) * config.workload.num_micro_batches):
        with ledger.phase("other"):  # every P-th time, the ranks exchange their tokens
            batch = next(loaded)
        # The adapter gives slices. A copy to a GPU makes them contiguous; on a CPU nothing else would.
        yield {name: tensor.to(device).contiguous() for name, tensor in batch.items()}


@dataclass
class Training:
    """A DeepSpeed engine around a Hugging Face model."""

    engine: Any
    config: TrialConfig
    device: torch.device
    token_losses: int  # so many next steps give them

    def step(self, batches: Iterable[dict[str, Tensor]]) -> StepResult:
        """One optimizer step on the micro-batches of this rank. Every rank of the world calls it."""
        parts = [self._accumulate(batch) for batch in batches]
        loss = torch.stack([loss for loss, _ in parts]).mean()
        if self.config.workload.loss_tile_tokens is not None:  # which is divided by their number already
            loss *= self.config.workload.num_micro_batches
        losses = [each for _, each in parts if each is not None]
        norm = zero3.grad_norm(self.engine, self.device)
        self.token_losses -= 1
        return StepResult(loss, norm, torch.cat(losses) if losses else None)

    def _accumulate(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        loss, losses = self._forward(batch)
        # the gradient of a tiled loss is there already, divided by the number of micro-batches
        self.engine.backward(loss, scale_wrt_gas=self.config.workload.loss_tile_tokens is None)
        self.engine.step()
        return loss.detach(), losses

    def _forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The mean loss over the tokens of the sequences, and the loss of each local token [B,s] if asked for.

        This is a function of its own so that nothing holds the logits during the backward, where memory peaks.
        """
        if self.config.workload.loss_tile_tokens is not None:
            loss, losses = self.engine(**batch)
            return loss, losses if self.token_losses > 0 else None
        if self.config.sp_size == 1:
            outputs = self.engine(**batch)
            loss = outputs.loss
        else:
            from transformers.integrations.deepspeed import (  # pyright: ignore[reportMissingImports]
                deepspeed_sp_compute_loss,
            )

            parallelism = SimpleNamespace(sp_backend="deepspeed", sp_size=self.config.sp_size)
            loss, outputs = deepspeed_sp_compute_loss(None, self.engine, batch, True, parallelism)
        if self.token_losses <= 0:
            return loss, None
        return loss, cross_entropy.detached(outputs.logits, hugging_face.shifted(batch))
