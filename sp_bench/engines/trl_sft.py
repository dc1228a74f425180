"""TRL's `SFTTrainer`, with the loop and the settings of `trainer_loop`.

TRL has a loss of its own. It computes the logits and log-probabilities one tile at a time, and once more in the
backward; whole logits never exist. In each step it also sums tokens, entropy and correct predictions over all ranks.
All of that is part of the timed step, because TRL's users pay for it. Our texts are token ids already, so TRL takes the
dataset as it is: it packs and truncates nothing, and its collator pads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from sp_bench.config.trial import TrialConfig
from sp_bench.engines import hugging_face, trainer_loop, zero3
from sp_bench.engines.trainer_loop import Stack
from sp_bench.training.text import tokens_of
from sp_bench.training.train import StepResult

UNPREDICTED = zero3.UNPREDICTED
UNLABELLED = hugging_face.UNLABELLED
traffic = hugging_face.traffic


def run(*given: Any, **named: Any) -> list[StepResult]:
    with _no_telemetry():
        return trainer_loop.run(stack, *given, **named)


def stack(config: TrialConfig) -> Stack:
    """SFTTrainer, and its data as TRL wants it."""
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    packed = config.workload.packing != "none"
    own = {
        "max_length": None,  # its default truncates at 1024 tokens
        "packing": False,  # it would pack the documents in an order of its own; ours come packed
        # The collator of packs, which `packing` switches on by itself. DeepSpeed's loader cannot cut its cu_seq_lens.
        # So where ranks share a sequence it is the other collator, whose position_ids restart in each document too.
        "padding_free": packed and config.sp_size == 1,
        "pad_to_multiple_of": config.sp_size,
        "loss_type": "nll",
    }
    return Stack(
        SFTTrainer, SFTConfig, partial(dataset, config), _token_losses, own, {"processing_class": _tokenizer()}
    )


def dataset(config: TrialConfig, sequences: list[Tensor]) -> Any:
    """A dataset of rows of S tokens, whose labels are the same tokens. Because it finds the columns `input_ids` and
    `labels`, TRL does not tokenise. Packs have the column that TRL's `pack_dataset` gives them: lengths of documents.
    """
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    different, places = hugging_face.distinct(sequences)
    texts = [sequence[:-1] for sequence in different]
    labels = [hugging_face.labels_unshifted(each[None], config)[0].tolist() for each in texts]
    columns = {"input_ids": [tokens_of(each).tolist() for each in texts], "labels": labels}
    if config.workload.packing != "none":
        columns["seq_lengths"] = [list(config.documents(len(each))) for each in texts]
    return Dataset.from_dict(columns).select(places)


def _tokenizer() -> Any:
    """A tokenizer of one token, because TRL demands one. TRL uses only its padding token, 0 as in
    `hugging_face.sample`."""
    from tokenizers import Tokenizer, models  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")


def _token_losses(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of each local token [B,s], in nats. On one rank TRL scores all tokens but the last, which gets 0."""
    losses = -outputs.log_probs.detach()
    return F.pad(losses, (0, batch["input_ids"].shape[1] - losses.shape[1]))


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """Switches off TRL's telemetry, which sends model, ranks and device to Hugging Face. A benchmark sends nothing."""
    from huggingface_hub import constants  # pyright: ignore[reportMissingImports]

    before = constants.HF_HUB_DISABLE_TELEMETRY
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = before
