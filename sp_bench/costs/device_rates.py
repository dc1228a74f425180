"""What devices of one kind reach. No rank imports it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceRates:
    """None: unknown."""

    products_flops_per_s: float | None = None
    attention_flops_per_s: float | None = None
    pair_bytes_per_s: float | None = None  # that each of two ranks sends the other
    all_bytes_per_s: float | None = None  # that each rank sends in an all-to-all
    source: str = ""
