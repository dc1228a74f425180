"""Kernels alone, forward and backward. CUDA ones need a device."""

import pytest
import torch

from sp_bench import kernels

CPU = [(name, "cpu", torch.float32, 512) for name in ("math", "cpu_flash")]
CUDA = [(name, "cuda", torch.bfloat16, 8192) for name in ("sdpa_flash", "cudnn")]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = [pytest.param(*c, id=c[0]) for c in CPU] + [pytest.param(*c, id=c[0], marks=needs_cuda) for c in CUDA]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("name", "device", "dtype", "seq_len"), CASES)
def test_forward_and_backward(
    benchmark, name: str, device: str, dtype: torch.dtype, seq_len: int, causal: bool
) -> None:
    kernel, scale = kernels.get(name), 128**-0.5
    heads = (8, 2, 2, 8)
    q, k, v, dout = (torch.randn(1, seq_len, h, 128, device=device, dtype=dtype) for h in heads)

    def step() -> torch.Tensor:
        out, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
        dq, _, _ = kernel.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
        wait(device)
        return dq

    dq = benchmark.pedantic(step, rounds=5, warmup_rounds=1)
    assert dq.isfinite().all()
