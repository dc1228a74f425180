"""A Hugging Face model under torch's FSDP2 and torch's context parallelism, both set up by Accelerate from its
`ParallelismConfig(cp_size=...)`, in the loop of Accelerate's guide to context parallelism.

For each micro-batch the loop takes a batch from the prepared data loader, enters `accelerator.maybe_context_parallel`,
which cuts the batch's tensors to this rank's tokens and replaces SDPA, and runs forward and backward inside it. That
cutting is part of the step. FSDP2 averages gradients over all ranks, so each rank divides its tokens' losses by the
mean number of labelled tokens of a rank: `num_items_in_batch`, which transformers' loss takes.

What the attention sends is what the method `torch_context_parallel` sends; Accelerate calls its variants
`cp_comm_strategy`. It always cuts head and tail, our zigzag layout.

B sequences of a micro-batch on a data-parallel rank; S valid and S' padded tokens of a sequence; P ranks share one;
s = S'/P local tokens; H heads of D elements.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from sp_bench.config.trial import TrialConfig
from sp_bench.engines import hugging_face
from sp_bench.engines.libraries import CONTEXT_PARALLEL
from sp_bench.measure import ledger, timing
from sp_bench.methods import torch_context_parallel
from sp_bench.training import cross_entropy, train
from sp_bench.training.cross_entropy import IGNORED
from sp_bench.training.model import fill
from sp_bench.training.train import Part, StepResult, Tick, Watch

# Accelerate decides which parameters make an FSDP group and which groups stay gathered, and its versions differ in it.
UNPREDICTED = ("parameters", "gradients")
UNLABELLED = 0  # labels are shifted here, from texts of S+1 tokens
traffic = hugging_face.traffic

_SDPA = "sdpa"  # transformers' name of the attention that context parallelism replaces
_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


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
    seq_len, size = train.padded_seq_len(config, texts[0].shape[1] - 1), config.workload.num_micro_batches
    with (
        hugging_face.accelerate_restored(),
        torch_context_parallel.restored(),
        _attention(config, seq_len, mesh),
        sdpa_kernel(_BACKENDS[config.kernel.name]),
    ):
        accelerator = _accelerator(config)
        model = _build(config, seq_len, device)
        optimizer = train.make_optimizer(model.parameters(), config.workload)
        model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(config, texts))
        num_labels = sum(int((each["shift_labels"] != IGNORED).sum()) for each in _samples(config, texts[0], seq_len))
        num_labelled = num_labels / size / config.world_size
        training = Training(accelerator, model, optimizer, config, num_labelled, token_losses, watch)
        model.loss_function = training.recorded(model.loss_function)
        loaded = _loaded(loader)
        results = train.run_steps(training.step, (islice(loaded, size) for _ in texts), tick)
        timing.synchronise(device)
        accelerator.free_memory()
    return hugging_face.averaged(results)


def _accelerator(config: TrialConfig) -> Any:
    """Accelerate's entry object: FSDP2 over the ranks of a replica, and context parallelism if ranks share a sequence.

    Its own mixed precision: parameters and moments are float32, layers run in bfloat16, and gradients travel in it.
    """
    from accelerate import Accelerator, ParallelismConfig  # pyright: ignore[reportMissingImports]
    from accelerate.utils import (  # pyright: ignore[reportMissingImports]
        FullyShardedDataParallelPlugin,
        TorchContextParallelConfig,
    )

    replicas, shards, handler = config.dp_replicate_size, config.dp_shard_size, None
    if config.sp_size > 1:
        handler = TorchContextParallelConfig(cp_comm_strategy=config.method.variant or "allgather")
    parallelism = ParallelismConfig(replicas, shards, cp_size=config.sp_size, cp_handler=handler)
    parallelism.device_mesh = _device_mesh(replicas, shards, config.sp_size, config.hardware.device)
    return Accelerator(
        mixed_precision="bf16" if config.dtype == "bfloat16" else "no",
        gradient_accumulation_steps=config.workload.num_micro_batches,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",  # each decoder layer, which transformers' models name
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,  # all ranks draw the same weights
        ),
        parallelism_config=parallelism,
    )


@cache  # the communicators of a mesh take device memory: the proof and the timed steps share one mesh
def _device_mesh(dp_replicate_size: int, dp_shard_size: int, cp_size: int, device: str) -> DeviceMesh:
    """The mesh that Accelerate makes of these sizes."""
    from accelerate import ParallelismConfig  # pyright: ignore[reportMissingImports]

    return ParallelismConfig(dp_replicate_size, dp_shard_size, cp_size=cp_size).build_device_mesh(device)


def _build(config: TrialConfig, seq_len: int, device: torch.device) -> nn.Module:
    """The whole model in float32 with our decoder's initial values, on each rank, until Accelerate shards it."""
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            hugging_face.model_config(config.model, seq_len),
            attn_implementation=_SDPA,
            dtype=train.stored_dtype(config.dtype),
        )
    for index, (name, parameter) in enumerate(hugging_face.named(config, model).items()):
        fill(parameter.data, name, index, config.seed)
    if config.workload.activation_checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=hugging_face.checkpointing_options())
    return model.train()


@contextmanager
def _attention(config: TrialConfig, seq_len: int, mesh: DeviceMesh) -> Iterator[None]:
    """Inside, transformers' sdpa attention tells the ledger what it sends, or is a method of ours, which stands in for
    torch's context parallelism where a step is proven in float32."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # pyright: ignore[reportMissingImports]

    theirs = ALL_ATTENTION_FUNCTIONS[_SDPA]

    def tagged(*args: Any, **kwargs: Any) -> Any:
        with ledger.attention():
            out, weights = theirs(*args, **kwargs)
        torch_context_parallel.mark_backward(out)
        return out, weights

    with ExitStack() as stack:
        if config.method.name == CONTEXT_PARALLEL:
            ALL_ATTENTION_FUNCTIONS[_SDPA] = tagged
        elif config.sp_size > 1:
            ours = stack.enter_context(train.open_attention(config, seq_len, mesh))

            def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
                # [B,H,s,D] -> [B,s,H,D], which is also what transformers wants back
                return ours(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), None

            ALL_ATTENTION_FUNCTIONS[_SDPA] = attend
        stack.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, _SDPA, theirs)
        yield


def _loader(config: TrialConfig, texts: Sequence[Tensor]) -> Any:
    """The sequences of all micro-batches of all steps. Accelerate deals out batches of B: one to each data-parallel
    rank, then the next one to each, which is the order of `train.micro_batches`. Ranks of one sequence get the same."""
    seq_len = train.padded_seq_len(config, texts[0].shape[1] - 1)
    different, places = hugging_face.distinct(texts)
    of_texts = [_samples(config, text, seq_len) for text in different]
    samples = [sample for place in places for sample in of_texts[place]]
    pinned = config.hardware.device == "cuda"
    return DataLoader(samples, batch_size=config.batch_size, pin_memory=pinned)  # pyright: ignore[reportArgumentType]


def _samples(config: TrialConfig, text: Tensor, seq_len: int) -> list[dict[str, Tensor]]:
    """Sequences [n,S+1] -> of each, input_ids and shift_labels [S'], and position_ids [S'] if ranks share it, or if it
    is of packed documents, in each of which they restart."""
    tokens, labels = train.shift_and_pad(text, seq_len)
    labels = labels.masked_fill(~train.is_labelled(config, text.shape[1] - 1, seq_len), IGNORED)
    needed = config.sp_size > 1 or config.workload.packing != "none"
    positions = {"position_ids": train.document_positions(config, seq_len)} if needed else {}
    return [{"input_ids": t, "shift_labels": wanted, **positions} for t, wanted in zip(tokens, labels, strict=True)]


def _loaded(loader: Any) -> Iterator[dict[str, Tensor]]:
    """This rank's batches, on its device; each is loaded when it is asked for."""
    batches = iter(loader)
    while True:
        with ledger.phase("other"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@dataclass
class Training:
    """A Hugging Face model that Accelerate has sharded, and its optimizer."""

    accelerator: Any
    model: Any
    optimizer: Any
    config: TrialConfig
    num_labelled: float  # tokens of a micro-batch with a label, the mean over ranks
    token_losses: int  # so many next steps give them
    watch: Watch | None
    losses: list[Tensor] = field(default_factory=list)  # of this step's micro-batches; on this rank, in float32

    def recorded(self, loss_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`loss_function`, whose results are kept too. In bf16 FSDP2 rounds what the model returns, its loss too."""

        def recording(*args: Any, **kwargs: Any) -> Tensor:
            loss = loss_function(*args, **kwargs)
            self.losses.append(loss.detach())
            return loss

        return recording

    def step(self, batches: Iterable[dict[str, Tensor]]) -> StepResult:
        """One optimizer step on the micro-batches of this rank. Every rank of the world calls it.

        Accelerate leaves gradients unreduced until the last micro-batch, and divides each loss by their number.
        """
        parts, norm = [], None
        self.losses.clear()
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                parts.append(self._accumulate(batch))
                if self.accelerator.sync_gradients:
                    norm = self._clip()
                with ledger.phase("optimizer"):
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        assert norm is not None, "Accelerate reduced no gradients in the last micro-batch"
        loss = torch.stack(self.losses).mean()
        losses = [each for each in parts if each is not None]
        self.token_losses -= 1
        return StepResult(loss, norm, torch.cat(losses) if losses else None)

    def _accumulate(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Forward and backward of one micro-batch. Returns the loss of each local token [B,s] if asked for."""
        with self._sharing(batch):
            loss, losses = self._forward(batch)
            with ledger.phase("backward"):
                self.accelerator.backward(loss)
        return losses

    @contextmanager
    def _sharing(self, batch: dict[str, Tensor]) -> Iterator[None]:
        """Inside, each tensor of `batch` [B,S'] holds this rank's tokens [B,s]; afterwards too."""
        if self.config.sp_size == 1:
            yield
            return
        tensors = list(batch.values())
        options = {"buffer_seq_dims": [1] * len(tensors), "no_restore_buffers": set(tensors)}
        with self.accelerator.maybe_context_parallel(buffers=tensors, **options):
            yield

    def _forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """This rank's part of the mean loss of the micro-batch, times the number of ranks, and the loss of each local
        token [B,s] if asked for.

        This is a function of its own so that nothing holds the logits during the backward, where memory peaks.
        """
        labels = batch["shift_labels"]
        outputs = self.model(**batch, labels=labels, num_items_in_batch=self.num_labelled)
        if self.token_losses <= 0:
            return outputs.loss, None
        return outputs.loss, cross_entropy.detached(outputs.logits, labels)

    def _clip(self) -> Tensor:
        """Show the gradients, and clip them if the trial does. Returns their norm before."""
        if self.watch is not None:
            self.watch(_parts(self.config, self.model))
        limit = self.config.workload.max_grad_norm
        with ledger.phase("other"):
            if limit is None:
                norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
            else:
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _parts(config: TrialConfig, model: nn.Module) -> Iterator[Part]:
    """The gradients of the parameters, gathered one at a time. Every rank of the world iterates over all of them."""
    for name, parameter in hugging_face.named(config, model).items():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor), f"{name} has no gradient, or Accelerate did not shard it"
        yield Part(name, gradient.full_tensor(), gradient.to_local(), parameter, 0)
