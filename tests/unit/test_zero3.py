"""What engines on ZeRO-3 replace of DeepSpeed's."""

import os
import sys
from types import SimpleNamespace

import torch
from torch.utils import cpp_extension

from sp_bench.engines import zero3


def test_flattened_parameters_are_views_of_one_tensor_and_keep_their_values():
    values = [torch.arange(3.0), torch.empty(0), torch.arange(5.0) + 10]
    tensors = [each.clone() for each in values]
    buffer = zero3.flattened(tensors)
    assert all(map(torch.equal, tensors, values))
    buffer += 1
    assert torch.equal(tensors[2], values[2] + 1)
    assert buffer.numel() == 8


def test_deepspeeds_adam_is_compiled_apart_from_other_programs_whose_lock_stays(tmp_path, monkeypatch):
    ours, theirs = tmp_path / "sp_bench" / "cpu_adam" / "lock", tmp_path / "cpu_adam" / "lock"
    for lock in (ours, theirs):
        lock.parent.mkdir(parents=True)
        lock.touch()

    class Builder:
        name = "cpu_adam"

        def load(self, verbose: bool) -> None:
            assert cpp_extension._get_build_directory(self.name, verbose) == str(ours.parent)
            assert not ours.exists()

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", SimpleNamespace(CPUAdamBuilder=Builder))
    zero3._compile_adam()
    assert theirs.exists()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path)
