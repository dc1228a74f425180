"""Steps replayed as a CUDA graph give the same values as eager steps for new inputs; otherwise they are `incorrect`."""

from dataclasses import replace

import pytest
import torch
from ranks import run, worlds
from test_methods import method_configs
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from trials import row

from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import FabricConfig, HardwareConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.model import ModelConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import WorkloadConfig
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle import reduced_length
from sp_bench.oracle.timed_length import check_replay, turn
from sp_bench.planning import plan

MODEL = ModelConfig("tiny", 1, 64, 64, 8, 2, 64, 256, 1e4, 1e-5, False, False, True)
WORKLOAD = WorkloadConfig("attention", "forward_backward", True, 2, 5, 128, attribution=True, launch="cuda_graph")


def trial(method: MethodConfig, sp_size: int, workload: WorkloadConfig = WORKLOAD) -> TrialConfig:
    nvlink, h200 = FabricConfig("nvlink", "nccl"), HardwareConfig("h200", "cuda")
    kernel = KernelConfig("sdpa_flash")
    return TrialConfig(method, kernel, MODEL, workload, nvlink, h200, 1, 1536, sp_size, 1, 1, "bfloat16", 0)


def check_rows(rank: int, sp_size: int) -> None:
    for method in method_configs(sp_size):
        for pass_kind in ("forward", "forward_backward"):
            timed_steps = "auto" if pass_kind == "forward" else WORKLOAD.timed_steps
            config = trial(method, sp_size, replace(WORKLOAD, pass_kind=pass_kind, timed_steps=timed_steps))
            if plan.unsupported_reason(config, num_gpus=sp_size) is not None:
                continue
            columns = row(config)
            errors = columns["replay_rel_error"]
            assert set(errors) == set(reduced_length.TENSORS if pass_kind == "forward_backward" else ["output"])
            assert max(errors.values()) < 1e-3, f"{config}: {errors}"
            assert columns["launched_kernels"], str(config)
            assert columns["comm_counted_bytes"] == columns["comm_predicted_bytes"], str(config)
            assert min(columns["peak_allocated_bytes"]) > 0
            assert len({len(steps) for steps in columns["rank_step_ms"]}) == 1
            assert ("compute_only_step_ms" in columns) == (sp_size > 1)


@pytest.mark.parametrize(("backend", "sp_size"), worlds(nccl=(1, 2, 3, 4, 8)))
def test_a_replayed_step_computes_and_sends_what_an_eager_one_does(backend: str, sp_size: int) -> None:
    run(sp_size, check_rows, sp_size, backend=backend)


def check_gate(rank: int) -> None:
    """Doubles stand in for a graph. One computes anew; the other has, on one rank, a result of the recorded inputs,
    which are turned before each comparison."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ring", "ulysses"))
    inputs = [torch.randn(1, 6, 2, 4) for _ in range(4)]
    budget = dict.fromkeys(reduced_length.TENSORS, 1e-6)

    def eager() -> list[Tensor]:
        q, k, v, dout = inputs
        return [q + v, dout * v, dout * q, dout * k]

    recorded = eager()
    turn(inputs)
    assert check_replay(eager, eager, budget, mesh) == dict.fromkeys(reduced_length.TENSORS, 0.0)
    for place, tensor in enumerate(reduced_length.TENSORS):

        def stale(place: int = place) -> list[Tensor]:
            return [recorded[i] if (i, rank) == (place, 1) else x for i, x in enumerate(eager())]

        with pytest.raises(Incorrect, match=rf"replayed step against an eager one: relative error of {tensor} is "):
            check_replay(stale, eager, budget, mesh)
    for bad in (0, 1):  # NaN on one rank only, which a maximum over ranks may lose

        def lost(bad: int = bad) -> list[Tensor]:
            return [x * float("nan") if (i, rank) == (1, bad) else x for i, x in enumerate(eager())]

        with pytest.raises(Incorrect, match="relative error of dq is inf"):
            check_replay(lost, eager, budget, mesh)
    assert set(check_replay(lambda: eager()[:1], lambda: eager()[:1], budget, mesh)) == {"output"}


def test_a_replay_with_a_result_of_the_recorded_inputs_is_incorrect_on_every_rank() -> None:
    run(2, check_gate)
