"""What a method is: the functions of its file, and what it yields once it is opened."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from sp_bench import hardware
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import ClosedForm
from sp_bench.kernels import Kernel

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from sp_bench.attention.autograd import Kept


@dataclass(frozen=True)
class SequenceParallelAttention:
    """What an opened method yields: an attention function, and which tokens its ranks hold."""

    layout: SequenceLayout
    attend: "Callable[..., Tensor]"  # an `Attend` of ours, or a library's function of q, k and v

    def with_sinks(self, sinks: "Tensor | None") -> "SequenceParallelAttention":
        """The same with these sinks [Hq], in a method that takes them. Their gradient is this rank's share."""
        if sinks is None:
            return self
        return replace(self, attend=lambda q, k, v, kept=None: self(q, k, v, kept, sinks))

    def of_latents(self, kernel: Kernel, head_dim: int) -> "SequenceParallelAttention":
        """The same of q, latents and up-projections: each rank makes keys and values of its own, which then travel."""
        from sp_bench.attention.latent import projection

        made = projection(kernel)
        return replace(self, attend=lambda q, latent, up: self.attend(q, *made(latent, up, head_dim)))

    def __call__(self, q: "Tensor", k: "Tensor", v: "Tensor", *rest: "Kept | Tensor | None") -> "Tensor":
        """q [B,S/P,Hq,D], k and v [B,S/P,Hkv,D] -> [B,S/P,Hq,D]; differentiable; tokens in `layout` order. rest: of
        methods of this package that are ours a `Kept` or None, and sinks [Hq]; of the gated delta rule g and beta."""
        return self.attend(q, k, v, *rest)


class Method(Protocol):
    """A module of this package, or from outside. It may also have

    - `PACKS = True`: it also computes packed documents (`AttentionShape.documents`), each of which sees itself only;
    - `CUTS_DOCUMENTS = True`: it also computes them in the layout document_zigzag;
    - `CONVERTS = True`: it also has the layout zigzag_by_kind;
    - `OWN_PACKED_KERNELS`: names of kernels of which the library has an own binding that takes packed documents, while
      ours takes none;
    - `NO_PACKS`: what it lacks for that, for those who ask for it;
    - `WINDOWS = True`: it also computes windows (`AttentionShape.window`) and sinks, which its `attend` then takes;
    - `GATED_DELTA = True`: it also computes the gated delta rule (`AttentionShape.gated_delta`);
    - `LATENTS = True`: it also sends latents (`MethodConfig.sends`) in the place of keys and values;
    - `Options`, from outside only: a frozen dataclass of its own options, found in `MethodConfig.own`;
    - `ring_degrees` and `send_rings`, as in double_ring: the two rings that its tensors travel around;
    - `TRAFFIC_IS_MEAN`: why ranks send different numbers of bytes, of which `traffic` is the mean;
    - `kernel_calls(method, shape, sp_size, rank)`: how often that rank of a sequence calls the kernel in one attention
      call. Without it, the attention's FLOPs and launches are not counted: the library has a kernel of its own, or
      the number of calls is unknown.
    """

    IMPLEMENTATION: str  # whose code: sp_bench, or the library and its version (`installed`)
    PRIMITIVE: str | Mapping[str, str]  # the collective that moves the attention tensors; of each variant, if several
    # (method, shape, sp_size) -> bytes one rank sends off-rank in one attention call, forward and backward. The bytes
    # that a step sends must equal it. None: there is no closed form, and bytes are counted only. Adapters and methods
    # from outside have it; that of our methods is in OF_METHODS of costs/attention.py (`closed_forms.traffic`).
    traffic: ClosedForm | None

    @staticmethod
    def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
        """Which token lives where.

        Raises:
            ConfigError: options that no shape could make valid.
        """
        ...

    @staticmethod
    def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
        """Why this method cannot split `shape` and run that kernel on the parts, naming what would work, or None.

        Whether `seq_len` can be cut is the layout's to say.
        """
        ...

    @staticmethod
    def open(
        method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
    ) -> AbstractContextManager[SequenceParallelAttention]:
        """`mesh` has the axes `ring` and `ulysses` innermost, in the layout's placement order, so that a rank of the
        world modulo sp_size is its rank in the sequence."""
        ...


def layout_of_heads(method: MethodConfig, sp_size: int) -> SequenceLayout:
    """That of a method whose ranks exchange heads, and so hold whole sequences for a while.

    Raises:
        ConfigError: it is asked to cut in another way.
    """
    if method.layout != "contiguous":
        raise ConfigError(f"method.layout={method.layout}: {method.name} gathers the whole sequence; use contiguous")
    return SequenceLayout(ulysses_degree=sp_size)


def installed(package: str) -> str:
    """`package==version` of a library here, or its name alone where it is not installed."""
    version = hardware.package_versions().get(package)
    return f"{package}=={version}" if version else package


def missing_library_reason(method: str, extra: str, *packages: str) -> Prose | None:
    """Why an adapter cannot run without the package that `extra` is named after, and `packages`, or None."""
    if not (missing := hardware.missing_packages(extra, *packages)):
        return None
    return f"method {method} needs {' and '.join(missing)}: pip install 'sp-bench[{extra}]'"
