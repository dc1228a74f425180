"""What the profiler saw, read from its raw events."""

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sp_bench.measure import launched


def test_raw_events_have_the_names_that_the_profiler_gives_its_events() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        (torch.ones(4, 4) @ torch.ones(4, 4)).sum()
    names = launched(profiler, DeviceType.CPU)
    assert {"aten::matmul", "aten::sum"} < names
    assert names == {event.name for event in profiler.events() or () if event.device_type == DeviceType.CPU}
    assert launched(profiler, DeviceType.CUDA) == set()
