"""ring-flash-attn beside transformers 5. Importing it leaves the modules that were imported, and nothing else."""

from types import ModuleType


def load() -> ModuleType:
    """The package. Its adapter for transformers, unused here, imports a name that transformers 5 no longer has: the
    name is there during the import only."""
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
