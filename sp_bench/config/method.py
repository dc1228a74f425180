"""Options of the method: how attention is split over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from sp_bench.config.declared import Declared
from sp_bench.config.parsing import require_positive
from sp_bench.config.workload import ATTENTION, TRAINING

OF_ANY_SIZE = ("ulysses", "ring", "all_gather")  # methods whose options fit any number of ranks


@dataclass(frozen=True)
class MethodConfig:
    """How attention is split over the `sp_size` ranks of one sequence. None: the method has no such option."""

    name: Annotated[
        str,
        Declared(
            "sequence-parallel method",
            column="method",
            words={
                "single": "one rank",
                "ulysses": "Ulysses",
                "upipe": "UPipe",
                "ring": "ring",
                "double_ring": "double ring",
                "all_gather": "all-gather",
                "usp": "USP",
                "state_passing": "state passing",
                "deepspeed_ulysses": "DeepSpeed's Ulysses",
                "deepspeed_ulysses_hf": "DeepSpeed's UlyssesSPAttentionHF",
                "ring_flash_attn": "ring-flash-attn",
                "ring_flash_attn_llama3": "ring-flash-attn, llama3",
                "yunchang": "yunchang",
                "torch_context_parallel": "torch context parallel",
                "transformer_engine": "TransformerEngine",
                "fla_context_parallel": "flash-linear-attention's context parallelism",
            },
        ),
    ]
    layout: Annotated[
        Literal["contiguous", "zigzag", "striped", "document_zigzag", "zigzag_by_kind"],
        Declared(
            "which tokens a rank holds: contiguous | zigzag | striped | document_zigzag | zigzag_by_kind, whose layers "
            "of kind window or delta convert to contiguous and back",
            of=ATTENTION,
        ),
    ] = "contiguous"
    variant: Annotated[
        str | None,
        Declared(
            "of an adapter's library: which of its own patterns; the adapter names them. state_passing: gather | chain",
            of=ATTENTION,
            words={
                "allgather": "all-gather",
                "alltoall": "all-to-all",
                "a2a": "all-to-all",
                "p2p": "ring",
                "usp": "USP",
                "ulysses": "Ulysses",
                "all_gather": "all-gather",
                "a2a+p2p": "USP",
                "gather": "by gather",
                "chain": "from rank to rank",
            },
        ),
    ] = None
    ulysses_degree: Annotated[
        int | None, Declared("ranks that exchange heads; usp chooses it, and ring_degree is the rest", unit="ranks")
    ] = None
    placement: Annotated[
        Literal["ulysses_inner", "ring_inner"] | None,
        Declared(
            "usp, yunchang: which group holds adjacent ranks, ulysses_inner | ring_inner",
            of=ATTENTION,
            words={"ring_inner": "ring inside", "ulysses_inner": ""},
            named=True,
        ),
    ] = None
    dkv_dtype: Annotated[
        Literal["input", "float32"] | None,
        Declared(
            "dK/dV travel in: input (the trial's dtype) | float32; null: the library decides, or the row is old",
            of=ATTENTION,
            words={"input": "", "float32": "dK/dV in fp32"},
        ),
    ] = None
    merge_dtype: Annotated[
        Literal["input", "float32"] | None,
        Declared(
            "ring, double_ring, usp: dtype of outputs and dQ between merges, input | float32",
            of=ATTENTION,
            words={"input": "merges in the input", "float32": ""},
        ),
    ] = None
    head_stride: Annotated[
        int | None,
        Declared(
            "all_gather, llama3: KV heads gathered at a time",
            unit="heads",
            of=ATTENTION,
            none_means="all",
            words={1: "1 KV head at a time", "": "{} KV heads at a time"},
            named=True,
        ),
    ] = None
    head_chunks: Annotated[
        int | None,
        Declared(
            "ulysses, usp: parts of the heads, each exchanged while another is computed",
            of=ATTENTION,
            none_means=1,
            words="{} chunks",
            named=True,
        ),
    ] = None
    head_stages: Annotated[
        int | None,
        Declared(
            "upipe: parts of the heads, exchanged and computed one after the other; null: one query head of each rank "
            "in each part",
            of=ATTENTION,
            none_means="one query head a rank",
            words="{} stages",
            named=True,
        ),
    ] = None
    inner_ring_degree: Annotated[
        int | None,
        Declared(
            "double_ring: ranks of an inner ring, which are neighbours; null: the divisor of sp_size at its square "
            "root or next above",
            unit="ranks",
            of=ATTENTION,
            none_means="balanced",
            named=True,
        ),
    ] = None
    sends: Annotated[
        Literal["latent"] | None,
        Declared(
            "ring, all_gather, of a model with kv_lora_rank: latent, of which each rank projects keys and values up; "
            "null: keys and values",
            of=ATTENTION,
            none_means="keys and values",
            words={"latent": "of latents"},
            named=True,
        ),
    ] = None
    exchange: Annotated[
        Literal["collectives", "copy_engines"] | None,
        Declared(
            "what moves the tensors: collectives of the group | copy_engines, which leave all SMs to the kernels; null "
            "in old rows: what their primitive says, else collectives",
            old_rows="collectives",
            words={"copy_engines": "copy engines", "collectives": ""},
            named=True,
        ),
    ] = None
    own: Annotated[
        Mapping[str, str | int | float | bool | None] | None,
        Declared("of a method from outside: the options that it declares itself", column=None, of=ATTENTION),
    ] = None
    states: Annotated[
        Literal["gather", "chain"] | None,
        Declared(
            "training: in layers of kind delta, states pass by gather or from rank to rank (chain), as in "
            "state_passing; null: heads are exchanged, as in ulysses",
            of=TRAINING,
            words={"gather": "states by gather", "chain": "states from rank to rank"},
            named=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        require_positive(self, "ulysses_degree", "inner_ring_degree", "head_stride", "head_chunks", "head_stages")
