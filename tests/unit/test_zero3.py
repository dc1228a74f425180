"""What engines on ZeRO-3 replace of DeepSpeed's."""

import torch

from sp_bench.engines import zero3


def test_flattened_parameters_are_views_of_one_tensor_and_keep_their_values():
    values = [torch.arange(3.0), torch.empty(0), torch.arange(5.0) + 10]
    tensors = [each.clone() for each in values]
    buffer = zero3.flattened(tensors)
    assert all(map(torch.equal, tensors, values))
    buffer += 1
    assert torch.equal(tensors[2], values[2] + 1)
    assert buffer.numel() == 8
