"""Why a method cannot compute something, naming those that can. Its flags say whether it computes packed documents,
windows and sinks, latents and the gated delta rule (`Method`); all else is its own `unsupported_reason`."""

from collections.abc import Collection

from sp_bench.config.method import MethodConfig
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.methods import NAMES, get


def _says(name: str, flag: str) -> bool:
    return getattr(get(name), flag, False)


def _able(flag: str) -> str:
    """The methods of this package that have the flag, such as PACKS."""
    return ", ".join(name for name in NAMES if _says(name, flag))


def reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    """Why the method cannot compute `shape` with that kernel over `sp_size` ranks, or None."""
    return (  # its own last: it may be that a library is not installed, which lacks something anyway
        packing_reason(method, shape)
        or window_reason(method, shape)
        or _values_reason(method, shape)
        or _delta_reason(method, shape)
        or get(method.name).unsupported_reason(method, kernel_name, shape, sp_size)
    )


def packing_reason(method: MethodConfig, shape: AttentionShape) -> Prose | None:
    """Why the method cannot compute packed documents, naming those that can, or None; and why its layout, which cuts
    documents, has none to cut."""
    cuts = _says(method.name, "CUTS_DOCUMENTS")
    if method.layout == "document_zigzag":
        if shape.documents and shape.window is not None:
            return "method.layout=document_zigzag: under a window contiguous shards have equal work; use contiguous"
        if cuts and shape.documents:
            return None
        way_out: Prose = "method.layout=zigzag" if cuts else f"method={_able('CUTS_DOCUMENTS')}"
        return f"method.layout=document_zigzag is for packed documents, in some methods; use {way_out}"
    if not shape.documents:
        return None
    if not _says(method.name, "PACKS"):
        if cuts:
            return f"method {method.name} computes packed documents in one layout; use method.layout=document_zigzag"
        why: Prose = getattr(get(method.name), "NO_PACKS", "") or "it does not say that it can"
        return f"method {method.name} computes no packed documents here: {why}; use method={_able('PACKS')}"
    if method.layout == "striped":
        return "method.layout=striped cuts packed documents into single tokens; use contiguous or zigzag"
    return None


def window_reason(method: MethodConfig, shape: AttentionShape) -> Prose | None:
    """Why the method cannot compute a window or sinks, naming those that can, or None."""
    if (shape.window is None and not shape.sinks) or _says(method.name, "WINDOWS"):
        return None
    lacking: Prose = "sinks" if shape.window is None else "windows"
    return f"method {method.name} computes no {lacking} here; use method={_able('WINDOWS')}"


def _values_reason(method: MethodConfig, shape: AttentionShape) -> Prose | None:
    """Why the method cannot take latents, or values of another size than keys, naming those that can, or None."""
    if method.sends == "latent" and not _says(method.name, "LATENTS"):
        return f"method {method.name} sends no latents; use method={_able('LATENTS')}, or method.sends=null"
    ours = get(method.name).IMPLEMENTATION == "sp_bench"
    if ours or (shape.value_dim == shape.head_dim and shape.kv_lora_rank is None):
        return None
    able = ", ".join(name for name in NAMES if get(name).IMPLEMENTATION == "sp_bench")
    what: Prose = "values of another size than keys" if shape.kv_lora_rank is None else "latents"
    return f"method {method.name} was not tried with {what}; use method={able}"


def _delta_reason(method: MethodConfig, shape: AttentionShape) -> Prose | None:
    """Why the method does not compute the gated delta rule, naming those that do, or None."""
    if not shape.gated_delta or _says(method.name, "GATED_DELTA"):
        return None
    return f"method {method.name} does not compute the gated delta rule here; use method={_able('GATED_DELTA')}"


def conversion_reason(method: MethodConfig, kinds: Collection[str]) -> Prose | None:
    """Why the method cannot compute these kinds of layers, each in a layout of its own, or None."""
    if method.layout != "zigzag_by_kind":
        return None
    if not _says(method.name, "CONVERTS"):
        able: Prose = _able("CONVERTS")
        return f"method.layout=zigzag_by_kind: method {method.name} does not convert; use method={able}, or zigzag"
    if method.sends == "latent":
        return "method.sends=latent, method.layout=zigzag_by_kind: latents are not converted; use method.layout=zigzag"
    if "window" in kinds or "delta" in kinds:
        return None
    return (
        "method.layout=zigzag_by_kind converts layers of kind window or delta, and there is none; use "
        "method.layout=zigzag"
    )
