"""The training loop of transformers' Trainer and its subclasses, on ZeRO-3, with the sequence parallelism of
Accelerate's `ParallelismConfig(sp_backend="deepspeed")`.

The Trainer runs its own loop. A callback of ours ticks when training begins and after each optimizer step. So a step is
all that the Trainer does between two ticks: its data loading, its check of the loss and its scheduler included.

ZeRO-3 shards over all ranks, whatever `dp_replicate_size` and `dp_shard_size` are. Only their product matters to
Accelerate.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sp_bench.config.trial import TrialConfig
from sp_bench.engines import hugging_face, zero3
from sp_bench.engines.libraries import ATTENTION
from sp_bench.measure import timing
from sp_bench.training import train
from sp_bench.training.train import StepResult, Tick, Watch


@dataclass(frozen=True)
class Stack:
    """A Trainer class, and what differs between Trainer classes."""

    trainer: type[Any]
    arguments: type[Any]  # transformers' TrainingArguments, or a subclass
    dataset: Callable[[list[Tensor]], Any]  # makes a dataset of sequences [S+1], in this order
    token_losses: Callable[[Any, dict[str, Tensor]], Tensor]  # the model's outputs and inputs -> [B,s], nats
    own_arguments: dict[str, Any] = field(default_factory=dict)  # further ones of `arguments`
    own_options: dict[str, Any] = field(default_factory=dict)  # further ones of `trainer`


def run(
    open_stack: Callable[[TrialConfig], Stack],
    config: TrialConfig,
    texts: Sequence[Tensor],
    mesh: DeviceMesh,
    device: torch.device,
    tick: Tick,
    *,
    token_losses: int,
    watch: Watch | None = None,
) -> list[StepResult]:
    """As `Engine.run`, with the Trainer that `open_stack` gives. `open_stack` imports the Trainer's libraries; it is
    called after DeepSpeed knows the device."""
    seq_len = train.padded_seq_len(config, texts[0].shape[1] - 1)
    with (
        zero3.library(config, device),
        hugging_face.attention_registry(config),
        _accelerate_state(config),
        tempfile.TemporaryDirectory() as folder,
    ):
        stack = open_stack(config)
        settings = _settings(config, seq_len) | stack.own_arguments
        # before the model, which is partitioned from the start because these announce ZeRO-3
        arguments = stack.arguments(output_dir=folder, max_steps=len(texts), **settings)
        model = hugging_face.build(config, seq_len)
        recorder = Recorder(model, device, config, stack.token_losses, token_losses)
        trainer = _trainer(config, stack, arguments, recorder, texts, tick, watch)
        trainer.train()
        trainer.deepspeed.destroy()
        timing.synchronise(device)
        trainer.accelerator.free_memory()
    return hugging_face.averaged(recorder.results())


def _settings(config: TrialConfig, seq_len: int) -> dict[str, Any]:
    """The trial as keyword arguments of transformers' TrainingArguments."""
    recompute = config.workload.activation_checkpointing == "full"
    return {
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.workload.num_micro_batches,
        "learning_rate": config.workload.learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": config.workload.max_grad_norm or 0.0,
        "bf16": config.dtype == "bfloat16",
        "gradient_checkpointing": recompute,
        "gradient_checkpointing_kwargs": hugging_face.checkpointing_options() if recompute else None,
        "deepspeed": zero3.settings(config),
        "accelerator_config": {"use_configured_state": config.hardware.device == "cpu"},
        "parallelism_config": _parallelism(config, seq_len) if config.sp_size > 1 else None,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": config.hardware.device == "cuda",
        "remove_unused_columns": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": config.seed,
    }


def _parallelism(config: TrialConfig, seq_len: int) -> Any:
    from accelerate import ParallelismConfig  # pyright: ignore[reportMissingImports]
    from accelerate.utils import DeepSpeedSequenceParallelConfig  # pyright: ignore[reportMissingImports]

    return ParallelismConfig(
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


class Recorder:
    """Collects what the Trainer's steps compute. Values stay on the device until `results`.

    A recorded loss is that of one micro-batch. The losses of a step's micro-batches add up to the step's loss, because
    the Trainer has divided each by the number of micro-batches or by the number of the step's tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        config: TrialConfig,
        token_losses: Callable[[Any, dict[str, Tensor]], Tensor],
        num_steps: int,
    ) -> None:
        self.model = model
        self.device = device
        self.num_micro_batches = config.workload.num_micro_batches
        self.losses: list[Tensor] = []
        self.grad_norms: list[Tensor] = []
        self.token_losses: list[Tensor] = []
        if num_steps:  # of the first so many steps

            def keep(model: nn.Module, args: Any, batch: dict[str, Tensor], outputs: Any) -> None:
                self.token_losses.append(token_losses(outputs, batch))
                if len(self.token_losses) == num_steps * self.num_micro_batches:
                    hook.remove()

            hook = model.register_forward_hook(keep, with_kwargs=True)

    def results(self) -> list[StepResult]:
        """One result for each optimizer step; the losses are those of this data-parallel rank."""
        size = self.num_micro_batches
        losses = [torch.stack(parts).sum() for parts in _chunks(self.losses, size)]
        token_losses = [torch.cat(parts) for parts in _chunks(self.token_losses, size)]
        return [StepResult(*step) for step in zip_longest(losses, self.grad_norms, token_losses)]


def _chunks(values: list[Tensor], size: int) -> list[list[Tensor]]:
    assert len(values) % size == 0, "the Trainer stopped between the micro-batches of a step"
    return [values[i : i + size] for i in range(0, len(values), size)]


def _trainer(
    config: TrialConfig,
    stack: Stack,
    arguments: Any,
    recorder: Recorder,
    texts: Sequence[Tensor],
    tick: Tick,
    watch: Watch | None,
) -> Any:
    """The stack's Trainer on all texts. It tells `recorder` what it computes, and calls `tick` around each step."""
    from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]

    class Recorded(stack.trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            recorder.losses.append(loss)
            return loss

        def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
            # The optimizer of all engines: the Trainer's own decays neither norms nor biases. For host memory
            # Accelerate makes DeepSpeed's Adam of it, and without AdamW's decay unless it is torch's AdamW.
            self.optimizer = train.make_optimizer(self.model.parameters(), config.workload)
            return self.optimizer

    class Ticking(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            zero3.tag_phases(trainer.deepspeed)
            zero3.show(trainer.deepspeed, hugging_face.named(config, trainer.deepspeed.module), watch)
            if config.sp_size > 1:
                hugging_face.tell_the_ledger(config)
            tick()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.grad_norms.append(zero3.grad_norm(trainer.deepspeed, recorder.device))
            if tick():
                control.should_training_stop = True

    trainer = Recorded(
        model=recorder.model,
        args=arguments,
        train_dataset=stack.dataset(_sequences(config, texts)),
        callbacks=[Ticking()],
        **stack.own_options,
    )
    return trainer


def _sequences(config: TrialConfig, texts: Sequence[Tensor]) -> list[Tensor]:
    """All ranks' sequences [S+1], in the order in which Accelerate hands out batches: one to each rank, then the next
    one to each."""
    of_ranks = [hugging_face.texts_of(texts, config, rank) for rank in range(config.world_size)]
    return [sequence for batches in zip(*of_ranks, strict=True) for batch in batches for sequence in batch]


@contextmanager
def _accelerate_state(config: TrialConfig) -> Iterator[None]:
    """As `hugging_face.accelerate_restored`, with what Accelerate needs for DeepSpeed on a CPU."""
    from accelerate.state import PartialState  # pyright: ignore[reportMissingImports]

    with hugging_face.accelerate_restored():
        if config.hardware.device == "cpu":
            # By itself Accelerate finds no backend for DeepSpeed on a CPU, and takes each rank for the only process.
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend=config.fabric.backend)
            del os.environ["ACCELERATE_USE_DEEPSPEED"]
        yield
