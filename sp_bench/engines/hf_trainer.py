"""The transformers Trainer with Accelerate's `ParallelismConfig(sp_backend="deepspeed")`, on ZeRO-3.

The Trainer runs its own loop; a callback of ours ticks when training begins and after each optimizer step, so a step is
all that the Trainer does from one to the next: its data loading, its check of the loss, its scheduler. ZeRO-3 shards
over all ranks whatever `dp_replicate_size` and `dp_shard_size` are: to Accelerate they are two factors of one number.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import train
from sp_bench.config import TrialConfig
from sp_bench.engines import hugging_face, zero3
from sp_bench.engines.support import ATTENTION
from sp_bench.train import StepResult

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
    seq_len = train.padded_seq_len(config, texts[0].shape[1] - 1)
    with (
        zero3.library(device),
        hugging_face.attention_registry(config),
        _accelerate_state(),
        tempfile.TemporaryDirectory() as folder,
    ):
        arguments = _arguments(config, seq_len, len(texts), folder)  # before the model: ZeRO-3 is announced by them
        recorder = Recorder(hugging_face.build(config, seq_len), device, token_losses=token_losses)
        trainer = _trainer(config, arguments, recorder, texts, tick)
        trainer.train()
        trainer.deepspeed.destroy()
        trainer.accelerator.free_memory()
    return hugging_face.averaged(recorder.results())


def _arguments(config: TrialConfig, seq_len: int, num_steps: int, folder: str) -> Any:
    from accelerate import ParallelismConfig  # pyright: ignore[reportMissingImports]
    from accelerate.utils import DeepSpeedSequenceParallelConfig  # pyright: ignore[reportMissingImports]
    from transformers import TrainingArguments  # pyright: ignore[reportMissingImports]

    parallelism = None
    if config.sp_size > 1:
        parallelism = ParallelismConfig(
            sp_backend="deepspeed",
            sp_size=config.sp_size,
            dp_replicate_size=config.dp_replicate_size,
            dp_shard_size=config.dp_shard_size,
            sp_handler=DeepSpeedSequenceParallelConfig(
                sp_seq_length=seq_len,
                sp_seq_length_is_variable=bool(config.engine.variable_seq_len),
                sp_attn_implementation=ATTENTION[config.kernel.name],
            ),
        )
    recompute = config.workload.activation_checkpointing == "full"
    # its own default optimizer, with our weight decay; sgd with our momentum
    optimizer = {"optim": "adamw_torch_fused", "weight_decay": 1e-2}
    if config.workload.optimizer == "sgd":
        optimizer = {"optim": "sgd", "optim_args": "momentum=0.9"}
    return TrainingArguments(
        output_dir=folder,
        max_steps=num_steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.workload.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=config.workload.max_grad_norm or 0.0,
        bf16=config.dtype == "bfloat16",
        gradient_checkpointing=recompute,
        gradient_checkpointing_kwargs=hugging_face.checkpointing_options() if recompute else None,
        deepspeed=zero3.settings(config),
        parallelism_config=parallelism,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=config.hardware.device == "cuda",
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
        **optimizer,
    )


class Recorder:
    """What the Trainer's steps computed, each as soon as it is there and none read before the end."""

    def __init__(self, model: nn.Module, device: torch.device, *, token_losses: bool) -> None:
        self.model = model
        self.device = device
        self.losses: list[Tensor] = []
        self.grad_norms: list[Tensor] = []
        self.token_losses: list[Tensor] = []
        if token_losses:
            model.register_forward_hook(self._keep_token_losses, with_kwargs=True)

    def _keep_token_losses(self, model: nn.Module, args: Any, batch: dict[str, Tensor], outputs: Any) -> None:
        self.token_losses.append(train.token_losses(outputs.logits.detach(), hugging_face.shifted(batch)))

    def results(self) -> list[StepResult]:
        steps = zip_longest(self.losses, self.grad_norms, self.token_losses)
        return [StepResult(*step) for step in steps]


def _trainer(
    config: TrialConfig, arguments: Any, recorder: Recorder, texts: Sequence[Tensor], tick: Callable[[], None]
) -> Any:
    from transformers import Trainer, TrainerCallback  # pyright: ignore[reportMissingImports]

    class Recorded(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            recorder.losses.append(loss)
            return loss

    class Ticking(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            zero3.tag_phases(trainer.deepspeed)
            if config.sp_size > 1:
                hugging_face.tell_the_ledger(config)
            tick()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            recorder.grad_norms.append(zero3.grad_norm(trainer.deepspeed, recorder.device))
            tick()

    trainer = Recorded(
        model=recorder.model,
        args=arguments,
        train_dataset=_rows(config, texts, arguments.world_size),
        callbacks=[Ticking()],
    )
    return trainer


def _rows(config: TrialConfig, texts: Sequence[Tensor], num_processes: int) -> list[dict[str, Tensor]]:
    """One sequence each, in the order in which Accelerate deals batches to the processes that it sees: one to each,
    then the next. With DeepSpeed on a CPU it sees one, whatever torch.distributed says, and gives all to each rank."""
    ranks = range(config.world_size) if num_processes == config.world_size else [dist.get_rank()]
    of_ranks = [hugging_face.samples(texts, config, rank) for rank in ranks]
    batches = [batch for batches in zip(*of_ranks, strict=True) for batch in batches]
    return [{name: rows[i] for name, rows in batch.items()} for batch in batches for i in range(config.batch_size)]


@contextmanager
def _accelerate_state() -> Iterator[None]:
    """Accelerate's singletons end with the training, and the environment is as it was: TrainingArguments writes to
    it what Accelerate reads."""
    from accelerate.state import AcceleratorState, GradientState  # pyright: ignore[reportMissingImports]

    before = dict(os.environ)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)
