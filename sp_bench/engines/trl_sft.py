"""TRL's `SFTTrainer`, in the loop and with the settings of `trainer_loop`.

It has a loss of its own: the head's product and the log-probabilities are computed a tile at a time, again in the
backward, and the logits never exist whole. Each step it sums tokens, entropy and correct predictions of all ranks. All
is in the step, since all is what its users pay for. The texts come tokenised, so its dataset is taken as it is: nothing
is packed or truncated, and its collator pads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from sp_bench.config.trial import TrialConfig
from sp_bench.engines import hugging_face, trainer_loop, zero3
from sp_bench.engines.trainer_loop import Stack
from sp_bench.training.train import StepResult

UNPREDICTED = zero3.UNPREDICTED
UNLABELLED = hugging_face.UNLABELLED
traffic = hugging_face.traffic


def run(
    config: TrialConfig,
    texts: Sequence[Tensor],
    mesh: DeviceMesh,
    device: torch.device,
    tick: Callable[[], None],
    *,
    token_losses: bool,
) -> list[StepResult]:
    with _no_telemetry():
        return trainer_loop.run(stack, config, texts, device, tick, token_losses=token_losses)


def stack(config: TrialConfig) -> Stack:
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    own = {
        "max_length": None,  # its default truncates at 1024 tokens
        "packing": False,
        "pad_to_multiple_of": config.sp_size,
        "loss_type": "nll",
    }
    return Stack(SFTTrainer, SFTConfig, _dataset, _token_losses, own, {"processing_class": _tokenizer()})


def _dataset(sequences: list[Tensor]) -> Any:
    """Rows of S tokens, labels and tokens alike: it looks for `input_ids` and `labels`, and where it finds them
    neither tokenises nor maps."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    tokens = [sequence[:-1].tolist() for sequence in sequences]
    return Dataset.from_dict({"input_ids": tokens, "labels": tokens})


def _tokenizer() -> Any:
    """It demands one, and of it wants the token to pad with: that of `hugging_face.sample`."""
    from tokenizers import Tokenizer, models  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")


def _token_losses(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Of a whole sequence it scores all tokens but the last, of a shared one the local tokens."""
    losses = -outputs.log_probs.detach()
    return F.pad(losses, (0, batch["input_ids"].shape[1] - losses.shape[1]))


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """Every trainer of TRL tells Hugging Face of its model, its ranks and its device; a benchmark tells nobody."""
    from huggingface_hub import constants  # pyright: ignore[reportMissingImports]

    before = constants.HF_HUB_DISABLE_TELEMETRY
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = before
