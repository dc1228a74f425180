"""The Trainer of transformers, with the loop and the settings of `trainer_loop`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench.config.trial import TrialConfig
from sp_bench.engines import hugging_face, trainer_loop, zero3
from sp_bench.engines.trainer_loop import Stack
from sp_bench.training import cross_entropy
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
    return trainer_loop.run(stack, config, texts, device, tick, token_losses=token_losses, watch=watch)


def stack(config: TrialConfig) -> Stack:
    """The Trainer, and its data as transformers wants it."""
    from transformers import Trainer, TrainingArguments  # pyright: ignore[reportMissingImports]

    def rows(sequences: list[Tensor]) -> list[dict[str, Tensor]]:
        """A sample [S'] for each sequence [S+1]. Samples are padded here, since the default collator only stacks."""
        different, places = hugging_face.distinct(sequences)
        batches = [hugging_face.sample(sequence[None], config) for sequence in different]
        samples = [{name: values[0] for name, values in batch.items()} for batch in batches]
        return [samples[place] for place in places]

    return Stack(Trainer, TrainingArguments, rows, _token_losses)


def _token_losses(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy.detached(outputs.logits, hugging_face.shifted(batch))
