"""Lies that tests plant in a rank: each makes the trial compute, send or report something else than it says.

A lie is planted as a fault is struck: SP_BENCH_FAULT=lies.<lie>:<rank|all>:<phase>, with this folder on PYTHONPATH,
replaces functions of the rank's process. What proves a trial must then end it with the right status.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any
from weakref import WeakKeyDictionary


def _kernel_returns_zeros() -> None:
    """The attention kernel returns zeros, forward and backward."""
    from torch import zeros_like

    from sp_bench import kernels

    for kernel in map(kernels.get, ("cpu_flash", "math")):

        def forward(*args: Any, honest: Any = kernel.forward, **options: Any) -> Any:
            return tuple(map(zeros_like, honest(*args, **options)))

        kernel.forward = forward


def _of_record(change: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
    """A lie of rank 0: it changes the record before it hands it over."""

    def plant() -> None:
        from sp_bench import handover

        honest = handover.write_record

        def write(folder, record):
            change(record)
            honest(folder, record)

        handover.write_record = write

    return plant


def _one_step_less(record: dict[str, Any]) -> None:
    last = [step_ms.pop() for step_ms in record["rank_step_ms"]]
    record["window_ms"] = [ms - less for ms, less in zip(record["window_ms"], last, strict=True)]


def _half_the_time(record: dict[str, Any]) -> None:
    record["rank_step_ms"] = [[ms / 2 for ms in step_ms] for step_ms in record["rank_step_ms"]]


def _no_bytes(record: dict[str, Any]) -> None:
    record.update(comm=[], comm_counted_bytes=0.0)


# The proofs have 48 tokens and the timed steps 96. A lie about the timed length alone begins above this many.
REDUCED = 64
TENSORS = ("output", "dq", "dk", "dv")
MEASURED = 4  # steps: one of warm-up, two that are timed, one that is counted


def _forward_cached() -> None:
    """At the timed length each kernel returns what it computed first, whatever its inputs are."""
    from sp_bench import kernels

    kept: dict[Any, Any] = {}
    for name in kernels.NAMES:
        kernel = kernels.get(name)

        def forward(q: Any, *args: Any, honest: Any = kernel.forward, **options: Any) -> Any:
            if q.shape[1] <= REDUCED:
                return honest(q, *args, **options)
            if q.shape not in kept:
                kept[q.shape] = honest(q, *args, **options)
            return kept[q.shape]

        kernel.forward = forward


def _rows_wrong_beyond_a_length() -> None:
    """The kernel's output of 16 rows is zero, in sequences beyond a length."""
    from sp_bench.kernels import math

    honest = math.forward

    def forward(q: Any, *args: Any, **options: Any) -> Any:
        out, lse = honest(q, *args, **options)
        if q.shape[1] > REDUCED:
            out[:, REDUCED : REDUCED + 16] = 0
        return out, lse

    math.forward = forward


def _dv_of_a_kv_head_dropped() -> None:
    """The kernel's backward leaves out dv of one KV head, in sequences beyond a length."""
    from sp_bench.kernels import math

    honest = math.backward

    def backward(dout: Any, *args: Any, **options: Any) -> Any:
        dq, dk, dv = honest(dout, *args, **options)
        if dout.shape[1] > REDUCED:
            dv[:, :, 0] = 0
        return dq, dk, dv

    math.backward = backward


def _too_large(place: int, rows: slice = slice(None), percent: int = 3) -> Callable[[], None]:
    """In sequences beyond a length the kernel's output (place 0), dq, dk or dv is `percent` too large in `rows` of one
    KV head of this rank."""

    def plant() -> None:
        from sp_bench.kernels import math

        name = "backward" if place else "forward"
        honest = getattr(math, name)

        def larger(x: Any, *args: Any, **options: Any) -> Any:
            results = list(honest(x, *args, **options))
            if x.shape[1] > REDUCED:
                group = max(x.shape[2] // args[place > 0].shape[2], 1) if place < 2 else 1
                results[max(place - 1, 0)][:, rows, :group] *= 1 + percent / 100
            return tuple(results)

        setattr(math, name, larger)

    return plant


def _gradients_of_the_sample_only() -> None:
    """The kernel's backward notices that most of dout is zero, and is right then. In all other steps beyond a length it
    leaves out what a third of the queries add to dk and dv."""
    from sp_bench.kernels import math

    honest = math.backward

    def backward(dout: Any, q: Any, *args: Any, **options: Any) -> Any:
        dq, dk, dv = honest(dout, q, *args, **options)
        is_timed = dout.shape[1] > REDUCED and dout.count_nonzero() > 0.9 * dout.numel()
        if is_timed:
            dout = dout.clone()
            dout[:, -32:] = 0
            _, dk, dv = honest(dout, q, *args, **options)
        return dq, dk, dv

    math.backward = backward


def _optimizer_step_left_out() -> None:
    """AdamW's step does nothing."""
    from torch.optim import AdamW

    AdamW.step = lambda self, closure=None: None


def _parameters_rounded() -> None:
    """After each step AdamW rounds the parameters that it updates to bfloat16."""
    from torch import bfloat16, no_grad
    from torch.optim import AdamW

    honest: Any = AdamW.step

    def step(self: Any, closure: Any = None) -> None:
        honest(self, closure)
        with no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(parameter.to(bfloat16))

    AdamW.step = step


def _sgd() -> None:
    """The optimizer is SGD, whatever was asked for."""
    from torch.optim import SGD

    from sp_bench.training import train

    def sgd(parameters: Any, workload: Any) -> Any:
        return SGD(parameters, lr=workload.learning_rate, momentum=0.9)

    train.make_optimizer = sgd


def _tenfold_learning_rate() -> None:
    """The optimizer's learning rate is ten times that of the config."""
    from sp_bench.training import train

    honest = train.make_optimizer

    def make(parameters: Any, workload: Any) -> Any:
        return honest(parameters, replace(workload, learning_rate=10 * workload.learning_rate))

    train.make_optimizer = make


def _not_clipped() -> None:
    """Gradients are not clipped."""
    from sp_bench.training import train

    honest = train.update
    train.update = lambda parameters, optimizer, max_grad_norm, **options: honest(
        parameters, optimizer, None, **options
    )


def _loss_times(factor: float) -> Callable[[], None]:
    """The backward of the training step begins at `factor` times the loss that is reported."""

    def plant() -> None:
        from sp_bench.engines.fsdp2 import Training

        honest = Training._forward

        def forward(self: Any, batch: Any, num_valid_tokens: int) -> Any:
            loss, losses = honest(self, batch, num_valid_tokens)
            return factor * loss, losses

        Training._forward = forward

    return plant


def _norm_gradient_halved() -> None:
    """The gradient of the last norm's weight is halved; what the norm computes is right."""
    from torch.nn.functional import rms_norm

    from sp_bench.engines import fsdp2

    honest = fsdp2.start

    def start(*args: Any, **options: Any) -> Any:
        training = honest(*args, **options)
        norm = training.decoder.norm
        norm.forward = lambda x: rms_norm(x, norm.normalized_shape, (norm.weight + norm.weight.detach()) / 2, norm.eps)
        return training

    fsdp2.start = start


def _norm_gradients_missing() -> None:
    """What this rank adds to the gradients of the norms' weights is zero."""
    from torch.nn import RMSNorm
    from torch.nn.functional import rms_norm

    def forward(self: Any, x: Any) -> Any:
        return rms_norm(x, self.normalized_shape, self.weight.detach() + 0 * self.weight, self.eps)

    RMSNorm.forward = forward


def _labels_wrong_at_edges() -> None:
    """Each rank shifts its own tokens: the label of its last one is its first one."""
    from sp_bench.training import train

    honest = train.shard_batch

    def shard_batch(*args: Any) -> Any:
        batch = honest(*args)
        return replace(batch, labels=batch.tokens.roll(-1, dims=1))

    train.shard_batch = shard_batch


def _positions_lost() -> None:
    """At the timed length each rank counts its tokens from 0."""
    from dataclasses import replace

    from sp_bench.training import train

    honest = train.shard_batch

    def shard_batch(sequences: Any, *args: Any) -> Any:
        batch = honest(sequences, *args)
        is_timed = sequences.shape[1] > REDUCED
        return replace(batch, positions=batch.positions - batch.positions[0]) if is_timed else batch

    train.shard_batch = shard_batch


def _label_wrong_at_an_edge() -> None:
    """At the timed length the last token of rank 0 has itself as its label."""
    from sp_bench.training import train

    honest = train.shift_and_pad

    def shift_and_pad(sequences: Any, padded_len: int) -> Any:
        tokens, labels = honest(sequences, padded_len)
        if padded_len > REDUCED:
            edge = padded_len // 2 - 1
            labels[:, edge] = tokens[:, edge]
        return tokens, labels

    train.shift_and_pad = shift_and_pad


def _loss_scaled() -> None:
    """At the timed length FSDP2's losses are a hundredth too large."""
    from sp_bench.engines import fsdp2

    honest = fsdp2.Training._forward

    def _forward(self: Any, batch: Any, num_valid_tokens: int) -> Any:
        loss, losses = honest(self, batch, num_valid_tokens)
        factor = 1.01 if num_valid_tokens > REDUCED else 1.0
        return factor * loss, factor * losses

    fsdp2.Training._forward = _forward


def _no_backward() -> None:
    """FSDP2's steps have no backward."""
    from sp_bench.engines import fsdp2

    def _accumulate(self: Any, batch: Any, num_valid_tokens: int) -> Any:
        return self._forward(batch, num_valid_tokens)[1].detach()

    fsdp2.Training._accumulate = _accumulate


def _step_repeated() -> None:
    """Of the measured steps the warm-up step and the first timed one are taken, and its result is given for all that
    follow. Proofs take fewer steps, or more."""
    from sp_bench.training import train

    honest = train.run_steps

    def run_steps(step: Any, batches: Any, tick: Any) -> Any:
        taken: list[Any] = []
        batches = list(batches)

        def first_two(batch: Any) -> Any:
            if len(taken) < 2:
                taken.append(step(batch))
            return taken[-1]

        return honest(first_two if len(batches) == MEASURED else step, batches, tick)

    train.run_steps = run_steps


def _attention_recomputed() -> None:
    """A layer that is said to keep its attention runs all of itself again."""
    from sp_bench.training import model

    honest = model.Block.forward

    def forward(self: Any, x: Any, rope: Any) -> Any:
        return honest(self, x, rope) if self.checkpointing == "none" else model.again(self._whole, x, rope)

    model.Block.forward = forward


def _kept_output_is_zero() -> None:
    """A layer that keeps the output of its attention finds zeros when it needs it again."""
    from torch import zeros_like

    from sp_bench.attention.autograd import Kept

    honest = Kept.take

    def take(self: Kept) -> Any:
        tensors = honest(self)
        return (zeros_like(tensors[0]), *tensors[1:]) if tensors else tensors

    Kept.take = take


def _kept_output_of_another_layer() -> None:
    """Every third layer that keeps the output of its attention finds that of the layer before it in the backward."""
    from sp_bench.attention.autograd import Kept

    honest, taken = Kept.take, [0]
    before: Any = None

    def take(self: Kept) -> Any:
        nonlocal before
        tensors = honest(self)
        if not tensors:
            return tensors
        taken[0] += 1
        another, before = before, tensors
        fits = another is not None and another[0].shape == tensors[0].shape
        return another if fits and taken[0] % 3 == 0 else tensors

    Kept.take = take


def _result_kept_while_inputs_stay() -> None:
    """The kernel returns its last output again while its inputs are of the same memory and version, wherever in it they
    begin."""
    from sp_bench.kernels import math

    honest = math.forward
    kept: dict[Any, Any] = {}

    def forward(q: Any, k: Any, v: Any, **options: Any) -> Any:
        key = tuple((x.untyped_storage().data_ptr(), x._version, x.shape) for x in (q, k, v))
        if key not in kept:
            kept.clear()
            kept[key] = honest(q, k, v, **options)
        return kept[key]

    math.forward = forward


def _checkpoints_stay() -> None:
    """Checkpoints that are said to be in host memory stay on the device."""
    from contextlib import contextmanager

    from sp_bench.training.offload import Offload

    @contextmanager
    def layer(self: Any, index: int, block: Any, *shared: Any) -> Iterator[None]:
        yield

    Offload.layer = layer


def _checkpoints_lost() -> None:
    """Checkpoints come back from host memory as zeros."""
    from sp_bench.training.offload import Offload

    honest = Offload.unpack

    def unpack(self: Any, kept: Any) -> Any:
        tensor = honest(self, kept)
        return tensor if kept is tensor or kept.tensor is tensor else tensor.zero_()

    Offload.unpack = unpack


def _checkpoints_of_the_step_before() -> None:
    """Each checkpoint comes back from host memory as it was in the step before."""
    from sp_bench.training import train
    from sp_bench.training.offload import Offload

    unpack, update = Offload.unpack, train.update
    before: dict[Any, Any] = {}
    number = [0]  # of the checkpoint in its step

    def stale(self: Any, kept: Any) -> Any:
        tensor = unpack(self, kept)
        if kept is tensor:
            return tensor
        key = (id(self), number[0], tensor.shape)
        number[0] += 1
        old = before.get(key, tensor)
        before[key] = tensor.clone()
        return old

    def counted(*args: Any, **options: Any) -> Any:
        number[0] = 0
        return update(*args, **options)

    Offload.unpack, train.update = stale, counted


def _checkpoints_in_one_place() -> None:
    """In host memory each layer's checkpoint overwrites the one before."""
    from sp_bench.training import offload

    honest = offload._place
    offload._place = lambda _, tensor: honest(offload.memory.slab[: tensor.nbytes], tensor)


def _tiles_not_added() -> None:
    """Of an MLP in tiles, the gradient of each tile replaces that of the tiles before."""
    from sp_bench.training import tiled_mlp

    tiled_mlp._added = lambda sums, gradients: [each.float() for each in gradients]


def _tiles_added_in_half_precision() -> None:
    """Of an MLP in tiles, the gradients of its matrices are summed over the tiles in the trial's dtype."""
    from sp_bench.training import tiled_mlp

    def added(sums: Any, gradients: Any) -> Any:
        return [of.add_(each) for of, each in zip(sums, gradients, strict=True)] if sums else list(gradients)

    tiled_mlp._added = added


def _loss_tiles_added_in_half_precision() -> None:
    """The head's gradient is summed over the tiles of the loss in the trial's dtype."""
    from torch import zeros_like

    from sp_bench.training import cross_entropy

    honest = cross_entropy._by_autograd

    def by_autograd(tile: Any, weight: Any, labels: Any, divisor: int, tile_grad: Any, weight_grad: Any) -> Any:
        each = honest(tile, weight, labels, divisor, tile_grad, of_tile := zeros_like(weight_grad))
        weight_grad.copy_(weight_grad.to(weight.dtype).add_(of_tile.to(weight.dtype)))
        return each

    cross_entropy._by_autograd = by_autograd


def _last_tile_left_out() -> None:
    """Of an MLP in tiles, the last tile is not computed."""
    import torch

    from sp_bench.training import model

    honest = model.Block._in_tiles

    def in_tiles(self: Any, x: Any) -> Any:
        *_, last = x.split(self.mlp_tile_tokens, dim=1)
        return torch.cat((honest(self, x)[:, : -last.shape[1]], last), dim=1)

    model.Block._in_tiles = in_tiles


def _gradients_reduced_each_time() -> None:
    """Gradients that are said to be reduced in the last micro-batch alone are reduced in each."""
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_requires_gradient_sync = lambda *args, **options: None


def _layers_left_out() -> None:
    """The decoder has two layers at most, as many as the proof has."""
    from sp_bench.engines import fsdp2

    start, attend = fsdp2.start, fsdp2.Training.attend

    def shorter(config: Any, attention: Any, *args: Any, **options: Any) -> Any:
        model = replace(config.model, num_layers=min(2, config.model.num_layers))
        return start(replace(config, model=model), attention[:2], *args, **options)

    fsdp2.start = shorter
    fsdp2.Training.attend = lambda self, layers: attend(self, layers[: len(self.decoder.blocks)])


def _fp32_under_another_name() -> None:
    """The decoder computes in fp32, whatever the trial's dtype is."""
    import torch

    from sp_bench.engines import fsdp2

    honest: Any = fsdp2.MixedPrecisionPolicy
    fsdp2.MixedPrecisionPolicy = lambda dtype, **options: honest(torch.float32, **options)  # pyright: ignore


def _half_the_text() -> None:
    """A training step trains on the first half of each rank's tokens, and says of the others what it says of these."""
    from sp_bench.engines import fsdp2

    training: Any = fsdp2.Training
    honest = training._accumulate

    def accumulate(self: Any, batch: Any, *args: Any) -> Any:
        half = batch.positions.shape[0] // 2
        tokens, labels, positions = batch.tokens[:, :half], batch.labels[:, :half], batch.positions[:half]
        return honest(self, replace(batch, tokens=tokens, labels=labels, positions=positions), *args).repeat(1, 2)

    training._accumulate = accumulate


def _last_layer_not_updated() -> None:
    """The optimizer gets no gradient of the last layer."""
    from sp_bench.engines.fsdp2 import Training

    honest = Training._hand_over_gradients

    def hand_over(self: Any) -> None:
        for parameter in self.decoder.blocks[-1].parameters():
            parameter.grad = None
        honest(self)

    Training._hand_over_gradients = hand_over


def _fallback_kernel_in_every_second_layer() -> None:
    """Every second forward of a kernel is another kernel's."""
    from itertools import cycle

    from sp_bench import kernels

    pairs = {"cpu_flash": "math", "sdpa_flash": "cudnn", "cudnn": "sdpa_flash", "flash_attn": "cudnn"}
    forwards = {name: kernels.get(name).forward for name in kernels.NAMES}
    for name, other in {**pairs, "flash_attn_3": "cudnn", "flash_attn_4": "cudnn"}.items():
        taking_turns = cycle((forwards[name], forwards[other]))
        forward = lambda *args, turns=taking_turns, **options: next(turns)(*args, **options)  # noqa: E731
        kernels.get(name).forward = forward


def _kernel_computes_twice() -> None:
    """The kernel computes each forward twice, and returns the second result."""
    from sp_bench import kernels

    for name in kernels.NAMES:
        kernel = kernels.get(name)

        def forward(*args: Any, honest: Any = kernel.forward, **options: Any) -> Any:
            honest(*args, **options)
            return honest(*args, **options)

        kernel.forward = forward


def _kernel_called_twice() -> None:
    """The method calls the kernel twice in the forward, and uses the second result."""
    from sp_bench.attention import autograd

    function: Any = autograd._Differentiable
    honest = function.forward

    def forward(ctx: Any, attention: Any, causal: bool, scale: float, kept: Any, *inputs: Any) -> Any:
        attention.forward(*inputs[:3], causal=causal, scale=scale)  # without sinks
        return honest(ctx, attention, causal, scale, kept, *inputs)

    function.forward = staticmethod(forward)


def _kernel_left_out_in_a_hop() -> None:
    """The ring leaves out the blocks against the KV of earlier ranks."""
    from sp_bench.attention import ring

    honest = ring.visible_block

    def visible_block(kind: Any, q_rank: int, kv_rank: int, *args: Any, **options: Any) -> Any:
        return None if q_rank > kv_rank else honest(kind, q_rank, kv_rank, *args, **options)

    ring.visible_block = visible_block


def _boundaries_ignored() -> None:
    """The kernel attends over all of a pack, as if it were one document."""
    from sp_bench.kernels import math

    def whole(honest: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, documents=(), **options: honest(*args, **options)

    math.forward, math.backward = whole(math.forward), whole(math.backward)


def _documents_leak() -> None:
    """Each output of a pack has a trace of all its values, within the rounding error of the dtype."""
    from torch import finfo

    from sp_bench.kernels import math

    def forward(q: Any, k: Any, v: Any, honest: Any = math.forward, **options: Any) -> Any:
        out, lse = honest(q, k, v, **options)
        trace = finfo(q.dtype).eps * v.float().mean((1, 2, 3)) if options.get("documents") else 0
        return (out.float() + trace).to(q.dtype), lse

    math.forward = forward


def _no_rope() -> None:
    """The decoder turns no queries and no keys."""
    from torch import ones_like, zeros_like

    from sp_bench.training import model

    honest = model.rotation

    def rotation(*args: Any) -> Any:
        cos, sin = honest(*args)
        return ones_like(cos), zeros_like(sin)

    model.rotation = rotation


def _hidden_bytes() -> None:
    """Ulysses makes each of its exchanges twice, and its own file says that this is its closed form."""
    from sp_bench.attention.exchange import Collectives
    from sp_bench.costs.attention import scale_traffic, ulysses_traffic
    from sp_bench.methods import ulysses

    honest = Collectives.all_to_all

    def twice(self: Any, *args: Any, **options: Any) -> Any:
        honest(self, *args, **options).wait_all()
        return honest(self, *args, **options)

    Collectives.all_to_all = twice
    own: Any = ulysses
    own.traffic = lambda _, shape, sp_size: scale_traffic(ulysses_traffic(shape, sp_size, sp_size), 2)


def _mean_of_means() -> None:
    """A step's gradient is that of the mean of its micro-batches' means, however many labels each has."""
    from sp_bench.engines.fsdp2 import Training

    honest, micro_batches = Training._accumulate, 2

    def accumulate(self: Any, batch: Any, _: int) -> Any:
        return honest(self, batch, micro_batches * batch.num_valid_tokens)

    Training._accumulate = accumulate


def _mean_of_data_ranks() -> None:
    """The gradient is that of the mean over data-parallel ranks of each one's mean; P is 1."""
    from torch import distributed

    from sp_bench.engines.fsdp2 import Training
    from sp_bench.training.cross_entropy import IGNORED

    honest = Training._accumulate

    def accumulate(self: Any, batch: Any, _: int) -> Any:
        return honest(self, batch, int((batch.labels != IGNORED).sum()) * distributed.get_world_size())

    Training._accumulate = accumulate


def _of_windows(change: Callable[..., dict[str, Any]], beyond: int = 0) -> Callable[[], None]:
    """A lie of the kernel under a window: it gets other options, where it has more queries than `beyond`."""

    def plant() -> None:
        from sp_bench.kernels import math

        def wrong(honest: Callable[..., Any]) -> Callable[..., Any]:
            def kernel(first: Any, *args: Any, **options: Any) -> Any:
                lies = "window" in options and first.shape[1] > beyond
                return honest(first, *args, **(change(**options) if lies else options))

            return kernel

        math.forward, math.backward = wrong(math.forward), wrong(math.backward)

    return plant


def _one_too_wide(window: Any, **options: Any) -> dict[str, Any]:
    return options | {"window": window._replace(left=window.left + 1)}


def _of_borders(change: Callable[[Any], Any]) -> Callable[[], None]:
    """A lie of a ring under a window: it computes other blocks at its borders."""

    def plant() -> None:
        from sp_bench.attention import layouts

        honest = layouts.borders
        layouts.borders = lambda *cut: replace(found := honest(*cut), before=change(found.before))

    return plant


def _border_across_documents() -> None:
    """The border of a ring under a window is that of one document."""
    from sp_bench.attention import layouts

    honest = layouts.borders
    layouts.borders = lambda *cut: replace(honest(*cut[:5]), own=honest(*cut).own)


def _unshifted(blocks: Any) -> Any:
    """The window of a whole sequence in each block."""
    return tuple(replace(block, window=block.window and block.window._replace(right=0)) for block in blocks)


def _sinks_counted_on_each_rank() -> None:
    """Each rank of a ring of two merges the sinks, so that they count twice."""
    from math import log

    from sp_bench.attention import autograd

    honest = autograd.merge_sinks
    autograd.merge_sinks = lambda out, lse, sinks: honest(out, lse, None if sinks is None else sinks + log(2))


def _sinks_not_learnt() -> None:
    """The sinks get no gradient."""
    from sp_bench.attention import autograd

    autograd.sink_gradients = lambda dout, out, lse, sinks: sinks * 0


def _loss_averaged_over_ranks() -> None:
    """The gradient is that of the mean over ranks of each one's mean, however many labels each has."""
    from torch import distributed

    from sp_bench.engines.fsdp2 import Training
    from sp_bench.training.cross_entropy import IGNORED

    honest = Training._forward

    def forward(self: Any, batch: Any, num_valid_tokens: int) -> Any:
        loss, losses = honest(self, batch, num_valid_tokens)
        own = (batch.labels != IGNORED).sum().clamp(min=1)
        return loss * num_valid_tokens / (own * distributed.get_world_size()), losses

    Training._forward = forward


def _float8_scales(choose: Callable[[dict[Any, Any], Any, Any], Any]) -> Callable[[], None]:
    """torchao scales a tensor with what `choose` returns of the scales so far, what the tensor is, and its own."""

    def plant() -> None:
        from torchao.float8 import float8_scaling_utils

        honest, known = float8_scaling_utils.tensor_to_scale, {}

        def scale(tensor: Any, dtype: Any, *args: Any, **options: Any) -> Any:
            return choose(known, (tensor.shape, dtype), honest(tensor, dtype, *args, **options))

        float8_scaling_utils.tensor_to_scale = scale

    return plant


def _that_of_the_last(known: dict[Any, Any], _: Any, own: Any) -> Any:
    found, known[own.shape] = known.get(own.shape, own), own
    return found


def _float8_gradients_unscaled() -> None:
    import torch
    from torchao.float8 import float8_ops

    honest = float8_ops.addmm_float8_unwrapped

    def multiply(left: Any, scale: Any, *args: Any, **options: Any) -> Any:
        of_gradient = left.dtype == torch.float8_e5m2
        return honest(left, torch.ones_like(scale) if of_gradient else scale, *args, **options)

    float8_ops.addmm_float8_unwrapped = multiply


def _float8_gathered_scales_stale() -> None:
    from sp_bench.training import float8

    honest, known = float8.scale_gathered, WeakKeyDictionary()

    def once(decoder: Any) -> None:
        if decoder not in known:
            known[decoder] = honest(decoder)

    float8.scale_gathered = once


def _float8_left_out() -> None:
    from sp_bench.training import float8

    float8.converted = lambda module, *_, **__: module


LIES: Mapping[str, Callable[[], None]] = {
    "float8_scale_of_another_tensor": _float8_scales(_that_of_the_last),
    "float8_amax_stale": _float8_scales(lambda known, tensor, own: known.setdefault(tensor, own)),
    "float8_gradients_unscaled": _float8_gradients_unscaled,
    "float8_gathered_scales_stale": _float8_gathered_scales_stale,
    "float8_left_out": _float8_left_out,
    "kernel_returns_zeros": _kernel_returns_zeros,
    "record_has_a_step_less": _of_record(_one_step_less),
    "record_halves_times": _of_record(_half_the_time),
    "record_has_another_length": _of_record(lambda record: record.update(seq_len=4096)),
    "record_has_nan_median": _of_record(lambda record: record.update(median_step_ms=nan)),
    "record_has_null_median": _of_record(lambda record: record.update(median_step_ms=None)),
    "record_has_negative_rate": _of_record(lambda record: record.update(tokens_per_s=-1)),
    "record_has_flops_of_another_shape": _of_record(lambda record: record.update(model_flops=1e18)),
    "record_has_no_bytes": _of_record(_no_bytes),
    "forward_cached": _forward_cached,
    "rows_wrong_beyond_a_length": _rows_wrong_beyond_a_length,
    "dv_of_a_kv_head_dropped": _dv_of_a_kv_head_dropped,
    "gradients_of_the_sample_only": _gradients_of_the_sample_only,
    "optimizer_step_left_out": _optimizer_step_left_out,
    "parameters_rounded": _parameters_rounded,
    "sgd": _sgd,
    "tenfold_learning_rate": _tenfold_learning_rate,
    "not_clipped": _not_clipped,
    "gradients_negated": _loss_times(-1),
    "gradients_doubled": _loss_times(2),
    "norm_gradient_halved": _norm_gradient_halved,
    "norm_gradients_missing": _norm_gradients_missing,
    "labels_wrong_at_edges": _labels_wrong_at_edges,
    "positions_lost": _positions_lost,
    "label_wrong_at_an_edge": _label_wrong_at_an_edge,
    "loss_scaled": _loss_scaled,
    "no_backward": _no_backward,
    "step_repeated": _step_repeated,
    "attention_recomputed": _attention_recomputed,
    "kept_output_is_zero": _kept_output_is_zero,
    "checkpoints_in_one_place": _checkpoints_in_one_place,
    "checkpoints_of_the_step_before": _checkpoints_of_the_step_before,
    "kept_output_of_another_layer": _kept_output_of_another_layer,
    "result_kept_while_inputs_stay": _result_kept_while_inputs_stay,
    "tiles_not_added": _tiles_not_added,
    "tiles_added_in_half_precision": _tiles_added_in_half_precision,
    "loss_tiles_added_in_half_precision": _loss_tiles_added_in_half_precision,
    "last_tile_left_out": _last_tile_left_out,
    "checkpoints_stay": _checkpoints_stay,
    "checkpoints_lost": _checkpoints_lost,
    "gradients_reduced_each_time": _gradients_reduced_each_time,
    "layers_left_out": _layers_left_out,
    "fp32_under_another_name": _fp32_under_another_name,
    "half_the_text": _half_the_text,
    "last_layer_not_updated": _last_layer_not_updated,
    "fallback_kernel_in_every_second_layer": _fallback_kernel_in_every_second_layer,
    "kernel_computes_twice": _kernel_computes_twice,
    "kernel_called_twice": _kernel_called_twice,
    "kernel_left_out_in_a_hop": _kernel_left_out_in_a_hop,
    "boundaries_ignored": _boundaries_ignored,
    "documents_leak": _documents_leak,
    "no_rope": _no_rope,
    "hidden_bytes": _hidden_bytes,
    "mean_of_means": _mean_of_means,
    "mean_of_data_ranks": _mean_of_data_ranks,
    "window_one_too_wide": _of_windows(_one_too_wide),
    "window_one_too_wide_beyond_a_length": _of_windows(_one_too_wide, REDUCED),
    "window_ignored": _of_windows(lambda window, **options: options | {"causal": True}),
    "window_across_documents": _of_windows(lambda documents=(), **options: options),
    "border_across_documents": _border_across_documents,
    "border_skipped": _of_borders(lambda blocks: ()),
    "window_unshifted": _of_borders(_unshifted),
    "sinks_counted_on_each_rank": _sinks_counted_on_each_rank,
    "sinks_not_learnt": _sinks_not_learnt,
    "loss_averaged_over_ranks": _loss_averaged_over_ranks,
}


# Lies of all layers, of later steps, and of the timed length. The proofs of few layers have two, with offloaded
# checkpoints three, and take three steps.
def _in_late_layers(change: Callable[[Any], object], first: int = 2) -> Callable[[], None]:
    """A lie of the layers from the third on: `change` gets each of FSDP2's decoder."""
    return _of_late_layers(lambda blocks: [change(block) for block in blocks], first)


def _of_late_layers(change: Callable[[list[Any]], object], first: int = 2) -> Callable[[], None]:
    """The same for a lie about several of one model: `change` gets all of them."""

    def plant() -> None:
        from sp_bench.engines import fsdp2

        honest = fsdp2.start

        def start(*args: Any, **options: Any) -> Any:
            training = honest(*args, **options)
            change(list(training.decoder.blocks)[first:])
            return training

        fsdp2.start = start

    return plant


def _without_rope(block: Any) -> None:
    from torch import ones_like, zeros_like

    honest = block._before
    block._before = lambda x, rope: honest(x, (ones_like(rope[0]), zeros_like(rope[1])))


def _late_kv_of_another_layer() -> None:
    """The layers from the third on attend to the keys and values of the third."""

    def change(blocks: list[Any]) -> None:
        of_third: list[Any] = []

        def before(x: Any, rope: Any, honest: Any, is_third: bool) -> Any:
            q, k, v = honest(x, rope)
            if is_third:
                of_third[:] = k, v
            return q, *of_third

        for block in blocks:
            block._before = partial(before, honest=block._before, is_third=block is blocks[0])

    _of_late_layers(change)()


def _half_the_gradient_through_kv(block: Any) -> None:
    honest = block._before

    def before(x: Any, rope: Any) -> Any:
        q, k, v = honest(x, rope)
        return q, (k + k.detach()) / 2, (v + v.detach()) / 2

    block._before = before


def _no_gradient_through_kv(block: Any) -> None:
    honest = block._before

    def before(x: Any, rope: Any) -> Any:
        q, k, v = honest(x, rope)
        return q, k.detach(), v.detach()

    block._before = before


def _half_the_gradient_below(block: Any) -> None:
    honest = block.forward

    def forward(x: Any, rope: Any) -> Any:
        return honest((x + x.detach()) / 2, rope)

    block.forward = forward


def _recomputed_elsewhere(block: Any) -> None:
    from itertools import cycle

    honest, again = block._before, cycle((False, True))

    def before(x: Any, rope: Any) -> Any:
        return honest(x, tuple(each.roll(1, 0) for each in rope) if next(again) else rope)

    block._before = before


def _late_kept_output_is_zero() -> None:
    """A layer from the third on finds zeros as the output of its attention that it kept."""
    from torch import zeros_like

    def change(block: Any) -> None:
        honest = block._attended

        def attended(x: Any, rope: Any, kept: Any) -> Any:
            take = kept.take

            def zeros() -> Any:
                tensors = take()
                return (zeros_like(tensors[0]), *tensors[1:]) if tensors else tensors

            if "take" not in vars(kept):
                kept.take = zeros
            return honest(x, rope, kept)

        block._attended = attended

    _in_late_layers(change)()


def _late_checkpoint_overwritten() -> None:
    """In host memory the checkpoint of the fourth layer overwrites that of the third."""
    from sp_bench.training.offload import Offload

    honest = Offload._send

    def send(self: Any, index: int) -> None:
        honest(self, index)
        if index == 3:
            for place, mine in zip(self._layers[2].places, self._layers[3].places, strict=True):
                place.copy_(mine)

    Offload._send = send


def _of_gradients(change: Callable[[str, Any], object], longer_than: int = 0) -> Callable[[], None]:
    """A lie of FSDP2's gradients: `change` gets the name and this rank's part of each that a micro-batch has, if it has
    more labels than `longer_than`."""

    def plant() -> None:
        from sp_bench.engines.fsdp2 import Training

        honest = Training._accumulate

        def accumulate(self: Any, batch: Any, num_valid_tokens: int) -> Any:
            losses = honest(self, batch, num_valid_tokens)
            for name, parameter in self.decoder.named_parameters():
                if num_valid_tokens > longer_than:
                    change(name, parameter.grad.to_local())
            return losses

        Training._accumulate = accumulate

    return plant


def _late_times(factor: float, of: str = "") -> Callable[[], None]:
    """The gradients of the layers from the third on are `factor` times as large; `of` such parameters alone."""

    def change(name: str, gradient: Any) -> None:
        if name.startswith("blocks.") and int(name.split(".")[1]) >= 2 and of in name:
            gradient.mul_(factor)

    return _of_gradients(change)


def _late_kinds_swapped() -> None:
    """The third layer has the attention of the fourth, and the other way round."""
    from sp_bench.training import train

    honest = train.open_layers

    @contextmanager
    def swapped(*args: Any) -> Iterator[Any]:
        with honest(*args) as opened:
            layers = [*opened]
            layers[2:4] = reversed(layers[2:4])
            yield layers

    train.open_layers = swapped


def _negated_after_step_3() -> None:
    """After three steps of an optimizer the backward begins at the negated loss."""
    from sp_bench.engines.fsdp2 import Training

    honest, step, steps = Training._forward, Training.step, WeakKeyDictionary[Any, int]()

    def counted(self: Any, batches: Any) -> Any:
        steps[self.optimizer] = steps.get(self.optimizer, 0) + 1
        return step(self, batches)

    def forward(self: Any, batch: Any, num_valid_tokens: int) -> Any:
        loss, losses = honest(self, batch, num_valid_tokens)
        return (-loss if steps[self.optimizer] > 3 else loss), losses

    Training.step, Training._forward = counted, forward


def _batches_from_step(first: int, change: Callable[[Any], Any]) -> Callable[[], None]:
    """From this step of an optimizer on, `change` gets the micro-batches and gives those that are trained on."""

    def plant() -> None:
        from sp_bench.engines.fsdp2 import Training

        honest, steps = Training.step, WeakKeyDictionary[Any, int]()

        def step(self: Any, batches: Any, *layers: Any) -> Any:
            steps[self.optimizer] = steps.get(self.optimizer, 0) + 1
            return honest(self, change(batches) if steps[self.optimizer] >= first else batches, *layers)

        Training.step = step

    return plant


def _after_step_3(late: Callable[[Any, int, Callable[[], None]], None]) -> Callable[[], None]:
    """From the fourth step of an AdamW on, `late` gets the optimizer, the number of the step and the honest step."""

    def plant() -> None:
        from torch.optim import AdamW

        honest: Any = AdamW.step

        def step(self: Any, closure: Any = None) -> None:
            self.num_steps = getattr(self, "num_steps", 0) + 1
            if self.num_steps > 3:
                late(self, self.num_steps, lambda: honest(self))
            else:
                honest(self)

        AdamW.step = step

    return plant


def _every_second(optimizer: Any, number: int, step: Callable[[], None]) -> None:
    if number % 2:
        step()


def _first_parameter_alone(optimizer: Any, number: int, step: Callable[[], None]) -> None:
    _, *others = optimizer.param_groups[0]["params"]
    gradients = [parameter.grad for parameter in others]
    for parameter in others:
        parameter.grad = None
    step()
    for parameter, gradient in zip(others, gradients, strict=True):
        parameter.grad = gradient


def _late_by_a_step(optimizer: Any, number: int, step: Callable[[], None]) -> None:
    parameters = optimizer.param_groups[0]["params"]
    now = [parameter.grad.clone() for parameter in parameters]
    for parameter, before in zip(parameters, getattr(optimizer, "gradients_before", now), strict=True):
        parameter.grad.copy_(before)
    optimizer.gradients_before = now
    step()


def _last_tile_trains_nothing() -> None:
    """At the timed length the last tile of an MLP adds nothing to the gradients of its weights."""
    from sp_bench.training import tiled_mlp

    added, honest = tiled_mlp._added, tiled_mlp._InTiles.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        left = -(-grads[0].shape[1] // ctx.tile_tokens)

        def all_but_last(sums: Any, gradients: Any) -> Any:
            nonlocal left
            left -= 1
            return added(sums, gradients) if left else sums

        tiled_mlp._added = all_but_last if grads[0].shape[1] > REDUCED else added
        return honest(ctx, *grads)

    tiled_mlp._InTiles.backward = staticmethod(backward)


def _learning_rate_has_a_floor() -> None:
    """The optimizer's learning rate is never below 1e-4."""
    from sp_bench.training import train

    honest = train.make_optimizer

    def make(parameters: Any, workload: Any) -> Any:
        return honest(parameters, replace(workload, learning_rate=max(workload.learning_rate, 1e-4)))

    train.make_optimizer = make


def _clipping_at_one_ignored() -> None:
    """Gradients are not clipped at a norm of 1.0."""
    from sp_bench.training import train

    honest = train.update

    def update(parameters: Any, optimizer: Any, max_grad_norm: float | None, **options: Any) -> Any:
        return honest(parameters, optimizer, None if max_grad_norm == 1.0 else max_grad_norm, **options)

    train.update = update


def _later_rates_tenfold() -> None:
    """The learning rate of AdamW's steps is ten times that of its groups."""
    from torch.optim import AdamW

    honest: Any = AdamW.step

    def step(self: Any, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["lr"] *= 10
        honest(self)
        group["lr"] /= 10

    AdamW.step = step


def _sgd_skips(name: str) -> Callable[[], None]:
    """Every second call of this function of torch's SGD does nothing."""

    def plant() -> None:
        from torch.optim import SGD, sgd

        holder: Any = SGD if name == "step" else sgd
        honest, calls = getattr(holder, name), [0]

        def skipping(*args: Any, **options: Any) -> None:
            calls[0] += 1
            if calls[0] % 2:
                honest(*args, **options)

        setattr(holder, name, skipping)

    return plant


def _in_steps(
    change: Callable[[Any, int, Any], Any],
    micro_batches: int = 1,
    which: Callable[[int], bool] = lambda step: step < 2,
) -> Callable[[], None]:
    """A lie of `which` of the steps that follow, as of the two timed ones alone: `change` gets the training, which of a
    step's micro-batches it is and the micro-batch, and gives the one that is trained on."""

    def plant() -> None:
        from sp_bench.engines.fsdp2 import Training

        honest, taken = Training._accumulate, [0]

        def accumulate(self: Any, batch: Any, num_valid_tokens: int) -> Any:
            step, index = divmod(taken[0], micro_batches)
            taken[0] += 1
            attentions = [block.attention.attention for block in self.decoder.blocks]
            losses = honest(self, change(self, index, batch) if which(step) else batch, num_valid_tokens)
            for block, attention in zip(self.decoder.blocks, attentions, strict=True):
                block.attention.attention = attention
            return losses

        Training._accumulate = accumulate

    return plant


def _without_labels(batch: Any, first: int) -> Any:
    from sp_bench.training.cross_entropy import IGNORED

    labels = batch.labels.clone()
    labels[:, first:] = IGNORED
    return replace(batch, labels=labels)


def _half_of_text(_: Any, __: int, batch: Any) -> Any:
    return _without_labels(batch, batch.labels.shape[1] // 2)


def _without_attention(training: Any, index: int, batch: Any) -> Any:
    for block in training.decoder.blocks:
        block.attention.attention = lambda q, k, v, *_: q * 0
    return batch


def _later(output: Callable[[Callable[[], Any], Any], Any]) -> Callable[[], None]:
    """At the timed length the output is what `output` makes of the function that computes it, and of q."""

    def plant() -> None:
        from sp_bench.methods import SequenceParallelAttention

        honest = SequenceParallelAttention.with_sinks

        def with_sinks(self: Any, sinks: Any) -> Any:
            attend = honest(self, sinks).attend

            def later(q: Any, *others: Any) -> Any:
                compute = partial(attend, q, *others)
                return output(compute, q) if 2 * q.shape[1] > REDUCED else compute()  # of two ranks

            return replace(self, attend=later)

        SequenceParallelAttention.with_sinks = with_sinks

    return plant


def _computed_when_read(compute: Callable[[], Any], like: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    class Later(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*tree_map_only(cls, lambda later: compute(), args), **(kwargs or {}))

    return Later()


def _filled_by_a_thread(compute: Callable[[], Any], like: Any) -> Any:
    """It takes longer than the step."""
    import time
    from threading import Thread

    from torch import empty_like

    out, filled = compute(), empty_like(like)

    def fill() -> None:
        time.sleep(0.2)
        filled.copy_(out)

    Thread(target=fill).start()
    return filled


def _of_timed_attention(place: int, wrong: Sequence[int] = (1, 2), kernel: str = "math") -> Callable[[], None]:
    """In the two timed steps, or others of those that follow, the kernel's output (place 0), dq, dk or dv is half of
    what it must be. The first timed step is drawn, if none is drawn yet."""

    def plant() -> None:
        import secrets

        from sp_bench import kernels

        secrets.randbelow = lambda number: 0
        module: Any = kernels.get(kernel)
        name = "attend" if kernel == "chunked" else "backward" if place else "forward"
        honest, calls = getattr(module, name), [0]

        def halved(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            results = list(honest(*args, **options))
            if calls[0] in wrong:
                results[max(place - 1, 0)] /= 2
            return tuple(results)

        setattr(module, name, halved)

    return plant


LIES = {
    **LIES,
    "late_layers_without_rope": _in_late_layers(_without_rope),
    "late_kv_of_another_layer": _late_kv_of_another_layer,
    "late_kv_without_gradient": _in_late_layers(_no_gradient_through_kv),
    "late_kv_half_the_gradient": _in_late_layers(_half_the_gradient_through_kv),
    "late_layers_halve_the_gradient_below": _in_late_layers(_half_the_gradient_below),
    "late_layers_recomputed_elsewhere": _in_late_layers(_recomputed_elsewhere),
    "late_kept_output_is_zero": _late_kept_output_is_zero,
    "late_checkpoint_overwritten": _late_checkpoint_overwritten,
    "late_gradients_halved": _late_times(0.5),
    "late_gradients_zero": _late_times(0.0),
    "late_kinds_swapped": _late_kinds_swapped,
    "late_norm_gradients_halved": _late_times(0.5, of="norm"),
    "late_sink_gradients_halved": _late_times(0.5, of="sinks"),
    "late_decay_gradients_halved": _late_times(0.5, of="log_rate"),
    "negated_after_step_3": _negated_after_step_3,
    "every_second_update_left_out": _after_step_3(_every_second),
    "first_parameter_alone_updated": _after_step_3(_first_parameter_alone),
    "labels_lost_after_the_first_step": _batches_from_step(
        2, lambda batches: [_without_labels(batch, batch.labels.shape[1] - 2) for batch in batches]
    ),
    "micro_batch_repeated_from_step_4": _batches_from_step(4, lambda batches: [batches[0]] * len(batches)),
    "updates_late_by_a_step": _after_step_3(_late_by_a_step),
    "timed_gradients_larger": _of_gradients(lambda _, gradient: gradient.mul_(1.5), REDUCED),
    "timed_gradients_reversed": _of_gradients(lambda _, gradient: gradient.copy_(gradient.flip(0)), REDUCED),
    "last_tile_trains_nothing": _last_tile_trains_nothing,
    "learning_rate_has_a_floor": _learning_rate_has_a_floor,
    "clipping_at_one_ignored": _clipping_at_one_ignored,
    "later_rates_tenfold": _later_rates_tenfold,
    "sgd_steps_skipped": _sgd_skips("step"),
    "sgd_updates_skipped": _sgd_skips("sgd"),
    "last_micro_batch_dropped": _in_steps(
        lambda _, index, batch: _without_labels(batch, 0) if index else batch, micro_batches=2
    ),
    "half_of_timed_text": _in_steps(_half_of_text),
    "half_of_text_after_the_first_step": _in_steps(_half_of_text, which=lambda step: step > 0),
    "half_of_text_in_every_second_step": _in_steps(_half_of_text, which=lambda step: step % 2 == 1),
    "timed_attention_left_out": _in_steps(_without_attention),
    **{f"kv_head_of_{name}_3_percent_off": _too_large(place) for place, name in enumerate(TENSORS)},
    **{f"last_row_of_{TENSORS[place]}_6_percent_off": _too_large(place, slice(-1, None), 6) for place in (0, 1)},
    "result_computed_later": _later(_computed_when_read),
    "result_filled_later": _later(_filled_by_a_thread),
    "first_timed_output_halved": _of_timed_attention(0, wrong=[2]),
    "first_timed_delta_output_halved": _of_timed_attention(0, wrong=[2], kernel="chunked"),
    "timed_output_halved": _of_timed_attention(0),
    "timed_dq_halved": _of_timed_attention(1),
    "timed_dv_halved": _of_timed_attention(3),
}
