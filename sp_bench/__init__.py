"""sp_bench: Ulysses sequence parallelism against Ring Attention, proven right before it is timed."""

__version__ = "0.1.0"
