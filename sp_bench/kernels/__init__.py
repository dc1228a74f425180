"""Local attention kernels: (q, k, v) -> (out, lse) and its backward, without communication.

One file a kernel. A kernel gives its log-sum-exp and takes it back, so that one kernel serves every method.
To add one: a file with what `Kernel` has, and its name in NAMES. One that stays outside this package is brought by the
entry point group sp_bench.kernels: docs/OUTSIDE.md.
"""

import importlib
import itertools
import re
import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from sp_bench.config import outside
from sp_bench.config.outside import CannotImport, Source
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import Window

if TYPE_CHECKING:
    import torch
    from torch import Tensor

REFERENCE = "math"  # the others, and every method, are held against it
NAMES = (REFERENCE, "cpu_flash", "sdpa_flash", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4")
OF_DELTA = ("chunked", "fla")  # compute the gated delta rule, and no softmax: a `DeltaKernel` each
LOOKS_LIKE_ATTENTION = r"(?i)flash|fmha|attention|attn|sdpa"  # generous: of CUDA kernels and of torch's operations
PREPARES_ATTENTION = r"transformer_engine::"  # what it launches itself packs tensors beside a kernel of the others


class Attention(Protocol):
    """Attention with its backward: a kernel on this rank's tensors, or the ranks of a ring or a gather together.

    q [B,Sq,Hq,D]; k, v [B,Sk,Hkv,D]; lse [B,Hq,Sq], fp32 (fp64 when q is). Values may be of another size than keys, and
    then `out` and its gradient are. `causal` means Sq == Sk. A row without visible keys has lse = -inf and out = 0.
    """

    def forward(self, q: "Tensor", k: "Tensor", v: "Tensor", *, causal: bool, scale: float) -> "tuple[Tensor, Tensor]":
        """out [B,Sq,Hq,D] in q's dtype, and lse."""
        ...

    def backward(
        self,
        dout: "Tensor",
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        out: "Tensor",
        lse: "Tensor",
        *,
        causal: bool,
        scale: float,
    ) -> "tuple[Tensor, Tensor, Tensor]":
        """dq, dk, dv in the shapes and dtypes of q, k, v. `out` and `lse` may be of a longer key sequence than k, v:
        the gradients are then this block's share."""
        ...


class Kernel(Attention, Protocol):
    """A module of this package, or from outside. It may also have

    - `CUDA_HELPERS`: a pattern of further CUDA kernels that it launches, whose names look like attention;
    - `PACKS = True`: `forward` and `backward` also take `documents`, the tokens of each document, in order. There are
      then as many queries as keys, of one sequence (B = 1). A query sees the keys of its own document: all of them, or
      with `causal` those up to its own place;
    - `WINDOWS = True`: both also take `window`, a `config.windows.Window`, which is the whole mask: `causal` is False.
      With `documents` beside it, it is the mask of each;
    - `OPS`: operations of torch that compute it -> how often a forward and a backward call each. They say what ran
      where no CUDA kernels are counted: on a CPU, and where a single step is timed.
    """

    # patterns of the CUDA kernel that each call launches once: forward, backward; None: plain operations of torch
    CUDA_KERNELS: tuple[str, str] | None

    def unsupported_reason(self, shape: AttentionShape, device: str) -> Prose | None:
        """Why this kernel cannot run `shape` on `device` (cpu or cuda), or None."""
        ...


class DeltaKernel(Protocol):
    """A module of this package that computes the gated delta rule, differentiably. Each value head has a state [D,E]:

        state = decay * state;  state += beta * k (v - state^T k)^T;  out = scale * state^T q

    `CUDA_KERNELS` and `unsupported_reason` are as in `Kernel`.
    """

    CUDA_KERNELS: tuple[str, str] | None

    def unsupported_reason(self, shape: AttentionShape, device: str) -> Prose | None: ...

    def attend(
        self,
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        g: "Tensor",
        beta: "Tensor",
        state: "Tensor | None",
        *,
        scale: float,
    ) -> "tuple[Tensor, Tensor]":
        """q, k [B,n,Hk,D]; v [B,n,H,E]; g, the logarithm of the decay in fp32 (fp64), and beta [B,n,H]; state
        [B,H,D,E] in fp32 (fp64) before the first token, None: 0 -> out [B,n,H,E] in v's dtype, and the state after the
        last token.
        Value head h reads the queries and keys of head h // (H/Hk)."""
        ...


DEEPSEEK = (192, 128)  # head_dim and v_head_dim of DeepSeek-V2 and V3


def half_precision_reason(
    name: str, shape: AttentionShape, device: str, max_head_dim: int, uneven: tuple[int, int] | None = None
) -> Prose | None:
    """Why a CUDA kernel for half precision cannot run `shape` on `device`, or None. uneven: a head_dim and v_head_dim
    that it takes although they differ."""
    if device != "cuda":
        return f"kernel {name} runs on CUDA only; use kernel=cpu_flash or math"
    if shape.dtype not in ("bfloat16", "float16"):
        return f"kernel {name} takes bfloat16 or float16, not dtype={shape.dtype}; use dtype=bfloat16, or kernel=math"
    if shape.value_dim != shape.head_dim:
        return None if (shape.head_dim, shape.value_dim) == uneven else even_values_reason(name, shape, uneven)
    if shape.head_dim % 8 or shape.head_dim > max_head_dim:
        return f"kernel {name} takes a head_dim that is a multiple of 8 up to {max_head_dim}, not {shape.head_dim}"
    return None


def even_values_reason(name: str, shape: AttentionShape, uneven: tuple[int, int] | None = None) -> Prose | None:
    """Why a kernel that takes values of the size of keys, or of the sizes `uneven`, cannot run `shape`, or None."""
    if shape.value_dim == shape.head_dim:
        return None
    same: Prose = "values of the size of keys"
    takes: Prose = f"head_dim={uneven[0]} with v_head_dim={uneven[1]}, or {same}" if uneven else same
    asked: Prose = f"head_dim={shape.head_dim} with v_head_dim={shape.value_dim}"
    return f"kernel {name} takes {takes}, not {asked}; use kernel=math"


def packs(name: str) -> bool:
    """Whether the kernel takes packed documents."""
    return getattr(get(name), "PACKS", False)


def packing_reason(name: str, shape: AttentionShape) -> Prose | None:
    """Why the kernel cannot run packed documents, naming those that can, or None."""
    if not shape.documents or packs(name):
        return None
    return f"kernel {name} takes no packed documents; use kernel={', '.join(each for each in NAMES if packs(each))}"


def sees_windows(name: str) -> bool:
    """Whether the kernel takes windows."""
    return getattr(get(name), "WINDOWS", False)


def window_reason(name: str, shape: AttentionShape) -> Prose | None:
    """Why the kernel cannot run a window, naming those that can, or None."""
    if shape.window is None or sees_windows(name):
        return None
    able = ", ".join(each for each in NAMES if sees_windows(each))
    return f"kernel {name} takes no windows; use kernel={able}"


def delta_reason(name: str, shape: AttentionShape) -> Prose | None:
    """Why the kernel is not of the model's kind of attention, naming those that are, or None."""
    if shape.gated_delta == (name in OF_DELTA):
        return None
    rule: Prose = "the gated delta rule" if shape.gated_delta else "softmax over keys"
    return f"kernel {name} does not compute {rule}; use kernel={', '.join(OF_DELTA if shape.gated_delta else NAMES)}"


@cache
def cumulative(documents: tuple[int, ...], device: "torch.device") -> "torch.Tensor":
    """The `cu_seqlens` of flash kernels: where each document begins, and where the last one ends; int32 [n+1]. Cached,
    because a copy to the device would make each timed step wait for the host."""
    import torch

    return torch.tensor([0, *itertools.accumulate(documents)], dtype=torch.int32, device=device)


def flash_mask(documents: tuple[int, ...], window: Window | None, device: "torch.device") -> dict[str, Any]:
    """Documents and a window by the names of the FlashAttention packages, which take packed tensors `without_batch`."""
    if not documents:
        return sides(window)
    ends, longest = cumulative(documents, device), max(documents)
    cuts = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return cuts | sides(window)


def without_batch(documents: tuple[int, ...], *tensors: "Tensor") -> "tuple[Tensor, ...]":
    """Packed tensors without their first axis, which is 1: [1,S,H,D] -> [S,H,D]; others as they are."""
    return tuple(each[0] for each in tensors) if documents else tensors


def with_batch(documents: tuple[int, ...], *tensors: "Tensor") -> "tuple[Tensor, ...]":
    """The way back of `without_batch`."""
    return tuple(each[None] for each in tensors) if documents else tensors


def sides(window: Window | None) -> dict[str, int]:
    """A window by the names of flash kernels, whose meaning is `Window`'s; nothing without one."""
    return {} if window is None else {"window_size_left": window.left, "window_size_right": window.right}


def seen(window: Window, q: "torch.Tensor", k: "torch.Tensor") -> "torch.Tensor":
    """Which of the keys k [B,Sk,Hkv,D] each query of q [B,Sq,Hq,D] sees: bool [Sq,Sk], for kernels that take a mask."""
    import torch

    place = k.shape[1] - q.shape[1]  # the last query and the last key lie side by side
    every = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    return every.triu(place - window.left).tril(place + window.right)


def same_document(documents: Sequence[int], device: "torch.device") -> "torch.Tensor":
    """Which tokens of a pack are of one document: bool [S,S], for kernels that take a mask."""
    import torch

    lengths = torch.tensor(documents, device=device)
    of_token = torch.arange(len(documents), device=device).repeat_interleave(lengths)
    return of_token[:, None] == of_token


Launches = Mapping[str, int]  # name of a CUDA kernel, or of an operation of torch -> how often it ran


def launched(cuda_kernels: Launches, asked_for: str) -> dict[str, tuple[Launches, Launches]]:
    """Which of our kernels, or of the kernel `asked_for`, launched them: name -> its (forward, backward) CUDA kernels,
    where there are any."""
    found: dict[str, tuple[Launches, Launches]] = {}
    for name in dict.fromkeys((*NAMES, *OF_DELTA, asked_for)):
        if patterns := get(name).CUDA_KERNELS:
            forward, backward = (_matching(pattern, cuda_kernels) for pattern in patterns)
            if forward or backward:
                found[name] = forward, backward
    return found


def unknown(cuda_kernels: Launches, asked_for: str) -> Launches:
    """Those of the CUDA kernels that look like attention, and are none that the kernel `asked_for` declares. None where
    it comes from outside and declares none."""
    kernel = get(asked_for)
    if kernel.CUDA_KERNELS is None and source_of(asked_for) is not None:
        return {}
    helpers = getattr(kernel, "CUDA_HELPERS", None)
    known = [PREPARES_ATTENTION, *(kernel.CUDA_KERNELS or ()), *([helpers] if helpers else ())]
    own = {name for pattern in known for name in _matching(pattern, cuda_kernels)}
    return {name: n for name, n in _matching(LOOKS_LIKE_ATTENTION, cuda_kernels).items() if name not in own}


def _matching(pattern: str, cuda_kernels: Launches) -> Launches:
    return {name: number for name, number in cuda_kernels.items() if re.search(pattern, name)}


def names() -> list[str]:
    """All kernels: ours, then those from outside."""
    return [*NAMES, *OF_DELTA, *outside.sources("kernel", (*NAMES, *OF_DELTA))]


def source_of(name: str) -> Source | None:
    """Where a kernel from outside comes from; None: it is one of ours, or there is none of that name."""
    return outside.source_of("kernel", name, (*NAMES, *OF_DELTA))


_EXAMPLES: Mapping[str, Prose] = {
    "CUDA_KERNELS": "CUDA_KERNELS = None  # or two patterns of names of CUDA kernels: forward, backward",
    "unsupported_reason": "def unsupported_reason(shape, device): return None",
    "forward": "def forward(q, k, v, *, causal, scale): return out, lse",
    "backward": "def backward(dout, q, k, v, out, lse, *, causal, scale): return dq, dk, dv",
}


def get(name: str) -> Kernel:
    """The kernel called `name`. One that cannot be imported comes as a stand-in that raises the error in `forward`.

    Raises:
        ConfigError: no such kernel (the nearest name and all names are given), or one that lacks something.
    """
    if name in (*NAMES, *OF_DELTA):
        return cast(Kernel, importlib.import_module(f"{__name__}.{name}"))
    source = outside.require_source("kernel", name, (*NAMES, *OF_DELTA))
    try:
        module = outside.load(source)
    except CannotImport as error:
        return _stand_in(error)
    outside.require(source, module, _EXAMPLES, {"unsupported_reason": 2})
    return cast(Kernel, module)


def _stand_in(error: CannotImport) -> Kernel:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise ImportError(str(error))

    stand_in = types.SimpleNamespace(CUDA_KERNELS=None, unsupported_reason=lambda *_: None, forward=fail, backward=fail)
    return cast(Kernel, stand_in)
