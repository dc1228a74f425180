"""The mesh of a trial's ranks: axes dp_replicate, dp_shard, ring and ulysses."""

from functools import cache

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sp_bench.attention.exchange import go_first
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.trial import TrialConfig


def of_trial(config: TrialConfig, layout: SequenceLayout) -> DeviceMesh:
    """Every rank of the world calls it."""
    inner = {"ring": layout.ring_degree, "ulysses": layout.ulysses_degree}
    if not layout.ulysses_inner:
        inner = dict(reversed(inner.items()))  # the last axis holds adjacent ranks
    axes = {"dp_replicate": config.dp_replicate_size, "dp_shard": config.dp_shard_size, **inner}
    return cached(config.hardware.device, tuple(axes.items()))


@cache  # a mesh has communicators, which take time and device memory: one for all trials of this process
def cached(device: str, axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh(device, sizes, mesh_dim_names=names, backend_override=go_first(device, "ring", "ulysses"))
