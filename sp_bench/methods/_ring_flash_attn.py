"""Imports ring-flash-attn beside transformers 5. Nothing stays in the process but the imported modules."""

from types import ModuleType


def load() -> ModuleType:
    """The package ring_flash_attn.

    Its adapter for transformers, which is not used here, imports a name that transformers 5 no longer has. So
    transformers gets that name for the time of the import.
    """
    from transformers import modeling_flash_attention_utils as utils  # pyright: ignore[reportMissingImports]

    name = "is_flash_attn_greater_or_equal_2_10"
    absent = not hasattr(utils, name)
    if absent:
        setattr(utils, name, True)
    try:
        import ring_flash_attn  # pyright: ignore[reportMissingImports]
    finally:
        if absent:
            delattr(utils, name)
    return ring_flash_attn
