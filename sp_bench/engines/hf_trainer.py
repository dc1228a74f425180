"""The Trainer of transformers, with the loop and the settings of `trainer_loop`."""

from functools import partial
from typing import Any

from torch import Tensor

from sp_bench.config.trial import TrialConfig
from sp_bench.engines import hugging_face, trainer_loop, zero3
from sp_bench.engines.trainer_loop import Stack
from sp_bench.training import cross_entropy

UNPREDICTED = zero3.UNPREDICTED
UNLABELLED = hugging_face.UNLABELLED
traffic = hugging_face.traffic


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


run = partial(trainer_loop.run, stack)


def _token_losses(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy.detached(outputs.logits, hugging_face.shifted(batch))
