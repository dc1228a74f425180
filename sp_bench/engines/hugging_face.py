"""What the engines on transformers share: the Hugging Face model, transformers' registry of attention, and the data.

The model is built from a config, without a download, and gets the initial values of our decoder. It has our rotary
pairing, norms and SwiGLU, so the two are the same function. That is why our training on one process is the reference.

m micro-batches a step; B sequences of a micro-batch on a data-parallel rank; S valid and S' padded tokens of a
sequence; P ranks share a sequence; s = S'/P local tokens.
"""

import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sp_bench import kernels
from sp_bench.attention.autograd import differentiable
from sp_bench.attention.masked import Masked
from sp_bench.attention.no_kernel import NoKernel
from sp_bench.config.documents import spans
from sp_bench.config.model import ModelConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import training as training_costs
from sp_bench.costs.attention import Traffic, add_traffic
from sp_bench.engines import zero3
from sp_bench.engines.libraries import ATTENTION
from sp_bench.kernels import REFERENCE
from sp_bench.measure import ledger
from sp_bench.measure.incorrect import Incorrect
from sp_bench.training import model, rotary, train
from sp_bench.training.cross_entropy import IGNORED
from sp_bench.training.text import labels_of, tokens_of
from sp_bench.training.train import StepResult

FLOAT32_FLASH = ("flash_attn", "float32")  # kernel and dtype, in the proof of a step in half precision alone
UNLABELLED = 1  # the data loader shifts labels within the tokens that it gets, so the last token has no label

_NAMES = {  # our decoder's name of a module -> transformers' name
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def their_name(ours: str) -> str:
    """What transformers calls a parameter of our decoder."""
    *module, kind = ours.split(".")
    if module[0] == "blocks":
        return ".".join((_NAMES["blocks"], module[1], _NAMES[".".join(module[2:])], kind))
    return f"{_NAMES['.'.join(module)]}.{kind}"


def model_config(model: ModelConfig, seq_len: int) -> Any:
    """The transformers config of `model`: a Qwen3 with qk_norm, a Qwen2 with qkv_bias, otherwise a Llama."""
    import transformers  # pyright: ignore[reportMissingImports]

    kind = transformers.LlamaConfig
    if model.qk_norm or model.qkv_bias:
        kind = transformers.Qwen3Config if model.qk_norm else transformers.Qwen2Config
    return kind(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=max(seq_len, int((model.rope_factor or 1) * (model.rope_original_seq_len or 1))),
        rms_norm_eps=model.norm_eps,
        rope_parameters=_rope_parameters(model),
        tie_word_embeddings=model.tie_embeddings,
        use_cache=False,
    )


def _rope_parameters(model: ModelConfig) -> dict[str, Any]:
    """What transformers calls the options of the rotary embedding."""
    if model.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": model.rope_theta}
    of_llama3 = {"low_freq_factor": rotary.LLAMA3_FEWEST, "high_freq_factor": rotary.LLAMA3_MOST}
    of_yarn = {"beta_slow": rotary.YARN_FEWEST, "beta_fast": rotary.YARN_MOST}
    return {
        "rope_type": model.rope_scaling,
        "rope_theta": model.rope_theta,
        "factor": model.rope_factor,
        "original_max_position_embeddings": model.rope_original_seq_len,
        **(of_llama3 if model.rope_scaling == "llama3" else of_yarn),
    }


def build(config: TrialConfig, seq_len: int) -> Any:
    """The trial's model with our decoder's initial values. Partitioned from the start if an HfDeepSpeedConfig lives."""
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    built = AutoModelForCausalLM.from_config(
        model_config(config.model, seq_len),
        attn_implementation=ATTENTION[config.kernel.name],
        dtype=getattr(torch, config.dtype),
    )
    parameters = named(config, built)
    zero3.initialise([(name, index, each) for index, (name, each) in enumerate(parameters.items())], config.seed)
    if config.workload.model_code == "liger":
        _apply_liger(built)
    if config.workload.mlp_tile_tokens is not None:
        for decoder_layer in built.model.layers:
            zero3.tile_mlp(decoder_layer.mlp, config.workload.mlp_tile_tokens)
    return built


def _apply_liger(built: nn.Module) -> None:
    """Liger's RMSNorm, rotary embedding and SwiGLU, by its own patch of a model. Its fused loss is left out: under
    ZeRO-3 it reads the head without gathering it, and finds no elements.

    Raises:
        Incorrect: the rotation is transformers' still. Of norms and SwiGLU the counted step tells.
    """
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        _apply_liger_kernel_to_instance,
    )

    theirs = _modeling(built)
    rotation = theirs.apply_rotary_pos_emb
    _apply_liger_kernel_to_instance(built, fused_linear_cross_entropy=False)  # pyright: ignore[reportArgumentType]
    if theirs.apply_rotary_pos_emb is rotation:
        raise Incorrect(
            f"workload.model_code=liger: Liger left the rotation of {theirs.__name__} as it was; use model_code=eager"
        )


def _modeling(kind: Any) -> Any:
    """The file at transformers of a model, or of the model of a config."""
    model_type = getattr(kind, "config", kind).model_type
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


@contextmanager
def _classes_restored(config: TrialConfig) -> Iterator[None]:
    """Restores what Liger replaces in the file of the model at transformers: its rotation and its classes."""
    if config.workload.model_code != "liger":
        yield
        return
    module = _modeling(model_config(config.model, 1))
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)


def named(config: TrialConfig, built: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a Hugging Face model by their names in our decoder, in its order."""
    ours = train.build_decoder(config.model, lambda q, k, v: q, config.dtype).named_parameters()
    theirs = dict(built.named_parameters())
    found = {name: theirs.pop(their_name(name)) for name, _ in ours}
    assert not theirs, f"parameters that our decoder does not have: {', '.join(theirs)}"
    return found


def checkpointing_options() -> dict[str, Any]:
    """The checkpointing options of the Hugging Face post, with the ledger's phase for the recomputation added."""
    return {"use_reentrant": False, "context_fn": model.recompute_contexts}


@contextmanager
def attention_registry(config: TrialConfig) -> Iterator[None]:
    """Restores what `register_with_transformers` changes: transformers' attention function, and DeepSpeed's process
    groups of the sequences with their names. Inside, torch's sdpa uses its math backend if the kernel is `math`; of the
    other kernels it picks one itself, and the kernels that ran are checked. With `workload.fit` it is `Unattended`.
    What Liger replaces is restored too."""
    from deepspeed.sequence import layer  # pyright: ignore[reportMissingImports]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # pyright: ignore[reportMissingImports]

    name = ATTENTION[config.kernel.name]
    attention, named_groups = ALL_ATTENTION_FUNCTIONS[name], dict(layer._all_to_all_groups)
    unattended = Unattended(attention, config.model.num_layers)
    if config.workload.fit:
        ALL_ATTENTION_FUNCTIONS[name] = unattended
    try:
        with (
            sdpa_kernel(SDPBackend.MATH) if config.kernel.name == REFERENCE else nullcontext(),
            _math_as_flash_attn() if (config.kernel.name, config.dtype) == FLOAT32_FLASH else nullcontext(),
            _classes_restored(config),
        ):
            yield
        if config.workload.fit:
            unattended.require_left_out()
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = attention
        layer._all_to_all_groups.clear()
        layer._all_to_all_groups.update(named_groups)
    if config.sp_size > 1:
        _destroy_groups(config)


@contextmanager
def _math_as_flash_attn() -> Iterator[None]:
    """Inside, transformers' flash attention calls our math kernel instead of flash-attn's functions, which take half
    precision only. All that comes before the call is theirs: how documents are found, and the shapes."""
    from transformers import modeling_flash_attention_utils as utils  # pyright: ignore[reportMissingImports]

    kernel, real = kernels.get(REFERENCE), utils.lazy_import_flash_attention

    def whole(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
        return differentiable(kernel, causal=causal, scale=softmax_scale)(q, k, v)

    def packed(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
    ) -> Tensor:
        # [T,H,D] of all documents, one after the other
        documents = Masked(kernel, {"documents": tuple(cu_seqlens_q.diff().tolist())})
        return differentiable(documents, causal=causal, scale=softmax_scale)(q[None], k[None], v[None])[0]

    def functions(*_: Any, **__: Any) -> tuple[Any, Any]:
        arguments = utils._lazy_define_process_function(packed)
        # newer releases have a second such function, for a paged cache, which training does not use
        paged = hasattr(utils, "_process_with_kvcache_kwargs_fn")
        return (whole, packed, None, None, None), (arguments, None) if paged else arguments

    utils.lazy_import_flash_attention = functions
    try:
        yield
    finally:
        utils.lazy_import_flash_attention = real


class Unattended:
    """transformers' `attention` without its arithmetic in all layers but the last: such a layer keeps q, k, v, the
    output and its LSE for its backward, and allocates all three gradients.

    DeepSpeed's own switch for it, `skip_all_but_last_attention_debug_mode`, keeps nothing of the layers that it skips,
    and finds the last one by counting calls. Recomputation goes from the last layer to the first, so it skips another
    one there, and torch refuses it: "a different number of tensors was saved" (DeepSpeed 0.19.8).
    """

    def __init__(self, attention: Callable[..., Any], num_layers: int) -> None:
        self._attention, self._num_layers = attention, num_layers
        self._idle = differentiable(NoKernel(torch.zeros), causal=True, scale=1.0)
        self._calls = {"computed": 0, "left out": 0}

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx == self._num_layers - 1:
            self._calls["computed"] += 1
            return self._attention(module, q, k, v, *args, **kwargs)
        self._calls["left out"] += 1
        # [B,H,S,D] -> [B,S,H,D], which is also what transformers wants back
        return self._idle(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), None

    def require_left_out(self) -> None:
        """
        Raises:
            Incorrect: what trained had another attention, or not this one in all layers.
        """
        computed, left_out = self._calls.values()
        if not computed or left_out != (self._num_layers - 1) * computed:
            raise Incorrect(
                f"workload.fit=true: of {self._num_layers} layers the last computed its attention {computed} times, "
                f"and the others left it out {left_out} times: the model has another attention; use fit=false"
            )


def _destroy_groups(config: TrialConfig) -> None:
    """Destroy DeepSpeed's groups. Their communicators take device memory, which must be free for the timed steps."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp  # pyright: ignore[reportMissingImports]

    if config.hardware.device == "cuda":
        torch.cuda.synchronize()
    for group in (parallel_state_sp._SEQUENCE_PARALLEL_GROUP, parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP):
        dist.destroy_process_group(group)
    parallel_state_sp._release_sequence_parallel_groups()


@contextmanager
def accelerate_restored() -> Iterator[None]:
    """Resets Accelerate's singletons after a training, and restores the environment, into which its plugins and
    TrainingArguments write what Accelerate reads."""
    from accelerate.state import AcceleratorState, GradientState  # pyright: ignore[reportMissingImports]

    before = dict(os.environ)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def tell_the_ledger(config: TrialConfig) -> None:
    """Wrap the registered attention, so that the ledger counts its collectives as attention. In the backward the ledger
    attributes all-to-alls to attention by itself.

    Raises:
        Incorrect: DeepSpeed or Accelerate has registered it for other lengths than `engine.variable_seq_len` says.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # pyright: ignore[reportMissingImports]

    name = ATTENTION[config.kernel.name]
    registered = ALL_ATTENTION_FUNCTIONS[name]
    asked = bool(config.engine.variable_seq_len)
    # The function that is registered has DeepSpeed's module in its closure. Nothing that it computes or sends differs.
    ran = [
        each.seq_length_is_variable
        for each in inspect.getclosurevars(registered).nonlocals.values()
        if hasattr(each, "seq_length_is_variable")
    ]
    if ran != [asked]:
        raise Incorrect(
            f"engine.variable_seq_len={asked}: the attention that was registered has seq_length_is_variable={ran}; use "
            f"engine.variable_seq_len={not asked}"
        )

    def attend(*args: Any, **kwargs: Any) -> Any:
        with ledger.attention():
            return registered(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = attend


def texts_of(texts: Sequence[Tensor], config: TrialConfig, rank: int) -> list[Tensor]:
    """The texts that the data loader of `rank` reads, [B,S+1] each: one for every P micro-batches.

    DeepSpeed's adapter takes one sample from each of the P ranks of a sequence, and makes P micro-batches of them. So
    rank r of the P reads the text of micro-batches r, P+r, 2P+r, ..., numbered through all steps. If they run out, the
    last text is repeated.
    """
    parts = [part for text in texts for part in train.micro_batches(config, text)]
    data_rank, sequence_rank = divmod(rank, config.sp_size)
    num_samples = -(-len(parts) // config.sp_size)
    mine = [parts[min(i * config.sp_size + sequence_rank, len(parts) - 1)] for i in range(num_samples)]
    num_data_ranks = config.world_size // config.sp_size
    return [text.chunk(num_data_ranks)[data_rank] for text in mine]


def distinct(texts: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Those of `texts` that are not the same memory as one before, and of each text its place among them. Most steps
    train on one text, and with `workload.timed_steps=auto` there are a hundred until the ranks know how many it takes.
    """
    places: dict[int, int] = {}
    index = [places.setdefault(text.data_ptr(), len(places)) for text in texts]
    return [texts[index.index(place)] for place in range(len(places))], index


def sample(sequences: Tensor, config: TrialConfig) -> dict[str, Tensor]:
    """sequences [B,S+1] -> input_ids and labels [B,S'], and position_ids [B,S'] if ranks share a sequence, or if it is
    of packed documents. There they restart in each document."""
    tokens, labels = tokens_of(sequences[:, :-1]), labels_unshifted(sequences[:, :-1], config)
    if config.workload.packing != "none":
        return _flattened(tokens, labels, config)
    padding = train.padded_seq_len(config, tokens.shape[1]) - tokens.shape[1]
    batch = {"input_ids": F.pad(tokens, (0, padding)), "labels": F.pad(labels, (0, padding), value=IGNORED)}
    if config.sp_size > 1:
        batch["position_ids"] = torch.arange(tokens.shape[1] + padding).expand_as(batch["input_ids"]).contiguous()
    return batch


def labels_unshifted(text: Tensor, config: TrialConfig) -> Tensor:
    """text [B,S] -> labels [B,S], which the model or a loader shifts: those are the tokens themselves, but IGNORED
    where nothing may be learned of them. That is the first ones of masked labels, and the first one of a document."""
    labels, seq_len = labels_of(text), text.shape[1]
    if config.workload.packing == "none" and not config.workload.masked_label_share:
        return labels
    labelled = train.is_labelled(config, seq_len, seq_len, unlabelled=UNLABELLED)
    return labels.masked_fill(~F.pad(labelled[:-1], (1, 0)), IGNORED)


def _flattened(tokens: Tensor, labels: Tensor, config: TrialConfig) -> dict[str, Tensor]:
    """The documents of a pack, tokens and labels [1,S], in one batch as transformers' own collator makes it: without an
    attention mask, and its position_ids say where documents begin."""
    from transformers import DataCollatorWithFlattening  # pyright: ignore[reportMissingImports]

    documents = [
        {"input_ids": tokens[0, whole.start : whole.stop], "labels": labels[0, whole.start : whole.stop]}
        for whole in spans(config.documents(tokens.shape[1]))
    ]
    return dict(DataCollatorWithFlattening()(documents))


def shifted(batch: dict[str, Tensor]) -> Tensor:
    """The label of each local token [B,s]. With sequence parallelism the adapter has shifted them; otherwise the model
    does so inside, and they are shifted here in the same way."""
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]


def averaged(results: Sequence[StepResult]) -> list[StepResult]:
    """The results with their losses averaged over the world: a stack's losses are those of one data-parallel rank, and
    all ranks have equally many tokens."""
    losses = torch.stack([result.loss for result in results])
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    return [result._replace(loss=loss) for result, loss in zip(results, losses, strict=True)]


def traffic(config: TrialConfig, padded_len: int) -> Traffic:
    """Bytes of the attention. What ranks send to exchange their losses is counted as `parameters`, which are not
    predicted."""
    attention = train.attention_traffic(config, padded_len)
    sent = {key: size for key, size in training_costs.unsharded_traffic(config, attention).items() if key[0] != "loss"}
    if config.world == "one_rank" and config.method.name == "deepspeed_ulysses_hf":
        # torch.distributed.nn sums the gradients of the losses by an all-to-all on any backend but NCCL's, whose
        # reduce-scatter sends as much. The ledger takes all-to-alls for attention's.
        losses = 4 * (config.sp_size - 1) * config.workload.num_micro_batches
        sent = add_traffic(sent, {("backward", "all_to_all"): Fraction(losses)})
    return sent
