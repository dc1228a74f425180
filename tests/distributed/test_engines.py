"""Whole training steps under other libraries' engines, on real ranks: equal to training on one process, and with the
predicted bytes where bytes can be predicted.

A test is skipped if its libraries are not installed.
"""

import gc
import inspect
import os
import reprlib
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import here, local_rank, run, worlds
from trials import ODD, PARITY, TINY, TRAIN, assembled, job, trial

from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import FabricConfig, HardwareConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import training as training_costs
from sp_bench.driver.derived import TIMES
from sp_bench.engines import requirements, zero3
from sp_bench.hardware import package_versions
from sp_bench.oracle import training_step
from sp_bench.training import train
from sp_bench.workloads import parity, train_step

RECOMPUTED = replace(TRAIN, activation_checkpointing="full")
TWO, THREE = (replace(TRAIN, micro_batches=n) for n in (2, 3))
LLAMA = replace(
    TINY,
    name="llama",
    qk_norm=False,
    tie_embeddings=True,
    rope_scaling="llama3",
    rope_factor=4.0,
    rope_original_seq_len=16,
)
QWEN2 = replace(TINY, name="qwen2", qk_norm=False, qkv_bias=True)
HF = "deepspeed_ulysses_hf"
ZIGZAG = MethodConfig("ring", "zigzag", dkv_dtype="float32")


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if name not in package_versions()]
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed")


TRL = "trl" in package_versions()
WITH_TRL = pytest.param("trl_sft", marks=needs("trl"))
LONG_WITH_TRL = pytest.param("trl_sft", marks=(needs("trl"), pytest.mark.faults))


def deepspeed_cases(world_size: int) -> list[TrialConfig]:
    """Methods of ours and an adapter, padded and not, tied and not, with recomputation and data parallelism."""
    make = partial(trial, engine=EngineConfig("deepspeed"))
    return {
        1: [make(MethodConfig("single"), 1, batch_size=2)],
        2: [
            make(MethodConfig("ulysses"), 2, seq_len=45),
            make(ZIGZAG, 2, seq_len=45, workload=RECOMPUTED, dtype="bfloat16"),
            make(MethodConfig("single"), 1, dp_shard_size=2, model=ODD),
            make(MethodConfig("deepspeed_ulysses"), 2, workload=RECOMPUTED),
            make(MethodConfig("ulysses"), 2, seq_len=45, workload=THREE),
            make(MethodConfig("single"), 1, dp_shard_size=2, batch_size=2, workload=TWO),
        ],
        3: [make(MethodConfig("ring", "striped", dkv_dtype="input"), 3, seq_len=43, model=ODD)],
        4: [make(MethodConfig("ulysses"), 2, dp_shard_size=2, workload=RECOMPUTED)],
    }[world_size]


def hugging_face_cases(name: str, world_size: int) -> list[TrialConfig]:
    """Qwen3, Llama and Qwen2 models, KV heads replicated and not, padded and not, fixed and variable lengths."""
    shared = partial(trial, MethodConfig(HF), kernel=KernelConfig("cpu_flash"))
    alone = partial(trial, MethodConfig("single"), 1, kernel=KernelConfig("cpu_flash"), engine=EngineConfig(name))
    fixed, variable = EngineConfig(name), EngineConfig(name, variable_seq_len=True)
    cases = {
        1: [alone(batch_size=2), alone(workload=THREE)],
        2: [
            shared(2, engine=fixed, workload=RECOMPUTED),
            shared(2, engine=variable, seq_len=45, model=LLAMA),
            shared(2, engine=fixed, batch_size=2),
            alone(dp_shard_size=2, model=QWEN2, seq_len=45),
            shared(2, engine=fixed, dtype="bfloat16", workload=TWO),
            shared(2, engine=fixed, seq_len=45, workload=replace(RECOMPUTED, micro_batches=3)),
            alone(dp_shard_size=2, seq_len=45, workload=TWO),
        ],
        4: [
            shared(4, engine=fixed, seq_len=45, workload=RECOMPUTED),
            shared(4, engine=fixed, workload=TWO),
            shared(2, engine=variable, dp_shard_size=2, model=LLAMA),
            shared(2, engine=fixed, dp_replicate_size=2),
        ],
    }[world_size]
    return [placed(config) for config in cases]


def placed(config: TrialConfig) -> TrialConfig:
    """On GPUs and in half precision, transformers' sdpa runs the same kernel as our sdpa_flash."""
    if here().type == "cpu":
        return config
    fabric, hardware = FabricConfig("nvlink", "nccl"), HardwareConfig("h200", "cuda")
    return replace(config, kernel=KernelConfig("sdpa_flash"), dtype="bfloat16", fabric=fabric, hardware=hardware)


def check(config: TrialConfig) -> None:
    """`run` proves the step: it raises Incorrect when losses, gradients or updates are not what they must be."""
    if config.engine.name == "deepspeed" and here().type == "cuda":
        config = replace(config, fabric=FabricConfig("nvlink", "nccl"), hardware=HardwareConfig("h200", "cuda"))
    measurement = train_step.run(job(config))
    counted = {
        key: size
        for key, (_, size) in measurement.counts.items()
        if size and key[0] not in ("other", *measurement.unpredicted)
    }
    assert counted == measurement.predicted, config
    assert len(measurement.columns["loss"]) == len(measurement.rank_step_ms) == config.workload.timed_steps
    columns, by_transformers = assembled(config, measurement), config.engine.name != "deepspeed"
    attention = training_costs.attention_flops(config, train.padded_seq_len(config, config.seq_len))
    assert columns["counted_matmul_flops"] + attention == columns["hardware_flops"], config
    assert columns["counted_attention_flops"] == (None if by_transformers else attention), config
    padding = columns["counted_parameters"] - training_costs.num_parameters(config.model)
    assert 0 <= padding <= config.world_size * 12 * (config.model.num_layers + 1), config  # of each flat parameter


SETTLED_S = 0.5  # gloo's threads hold the tensors of a finished collective until they are scheduled once more


def tensors_left() -> list[str]:
    """The tensors that this process keeps in memory, and what holds each of them. Tensors that torch's own code holds
    are left out, and so are single numbers: those are constants of imported modules, never part of a model."""
    time.sleep(SETTLED_S)
    gc.collect()
    tensors = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    found = [t for t in tensors if t.device.type != "meta" and t.numel() > 1]
    return [f"{t.dtype} {list(t.shape)} on {t.device}, held by {_holders(t, found)}" for t in found]


def _holders(tensor: torch.Tensor, found: list[torch.Tensor]) -> list[str]:
    others = (each for each in gc.get_referrers(tensor) if each is not found and not inspect.isframe(each))
    return [f"{type(each).__name__} {reprlib.repr(each)}" for each in others]


def as_a_rank(rank: int, world_size: int) -> None:
    """Sets the environment variables from which DeepSpeed and Accelerate read their rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank()), "WORLD_SIZE": str(world_size)}


def check_engine(rank: int, name: str, world_size: int) -> None:
    as_a_rank(rank, world_size)
    cases = deepspeed_cases(world_size) if name == "deepspeed" else hugging_face_cases(name, world_size)
    for config in cases:
        reason = requirements.unsupported_reason(config)
        if reason is None:
            check(config)
            left = tensors_left()  # what is left would take memory during the next training of this process
            assert left == [], f"{config}: {left}"
        else:
            assert "over gloo" in reason or "on a CPU" in reason or "dp_replicate_size" in reason, reason


def check_parity(rank: int, name: str) -> None:
    """The data loader of each rank has the text of another step. So a wrong order of samples shows."""
    as_a_rank(rank, 2)
    method, kernel = ("ulysses", "math") if name == "deepspeed" else (HF, "cpu_flash")
    config = trial(MethodConfig(method), 2, workload=PARITY, engine=EngineConfig(name), kernel=KernelConfig(kernel))
    for number in (None, 3):  # with three, a step begins in the middle of a sample that the adapter has cut
        several = replace(config, workload=replace(PARITY, micro_batches=number))
        columns = parity.run(job(several)).columns
        assert columns["mean_nll_difference"] <= columns["max_nll_difference"] <= parity.NLL_TOLERANCE
        assert columns["max_grad_norm_difference"] <= parity.GRAD_NORM_TOLERANCE
        assert len(columns["loss"]) == 20


@needs("deepspeed", "transformers", "accelerate")
@pytest.mark.parametrize("engine", ["deepspeed", "hf_deepspeed", "hf_trainer", WITH_TRL])
def test_twenty_steps_agree_with_one_process(engine: str) -> None:
    run(2, check_parity, engine)


def check_offload(rank: int, adam: str) -> None:
    as_a_rank(rank, 2)
    names = {"deepspeed": "ulysses", "hf_deepspeed": HF, "hf_trainer": HF} | ({"trl_sft": HF} if TRL else {})
    for name, method in names.items():
        engine = EngineConfig(name, optimizer_offload=adam)  # pyright: ignore[reportArgumentType]
        workload = TWO if name == "hf_deepspeed" else TRAIN  # with two micro-batches gradients add up in host memory
        config = trial(MethodConfig(method), 2, engine=engine, workload=workload, kernel=KernelConfig("cpu_flash"))
        losses = train_step.run(job(config)).columns["loss"]
        without = train_step.run(job(replace(config, engine=EngineConfig(name)))).columns["loss"]
        assert losses == pytest.approx(without, rel=1e-5), config
        assert losses[1] < losses[0] - 1e-4, config


NO_COMPILER = not (shutil.which("c++") and shutil.which("ninja"))
COMPILED = (  # once for a user and a version of torch: two minutes of two cores
    pytest.mark.timeout(1800),
    pytest.mark.skipif(NO_COMPILER, reason="DeepSpeed compiles its Adam, and c++ or ninja is missing"),
)


@needs("deepspeed", "transformers", "accelerate")
@pytest.mark.parametrize("adam", ["torch_adamw", pytest.param("deepspeed_cpu_adam", marks=COMPILED)])
def test_an_optimizer_in_host_memory_takes_the_same_steps(adam: str) -> None:
    """DeepSpeed's is compiled, or loaded, although a process that was killed while it compiled left torch's lock."""
    if adam == "deepspeed_cpu_adam":
        from torch.utils import cpp_extension  # imports setuptools

        folder = Path(cpp_extension._get_build_directory("sp_bench", False), "cpu_adam")
        folder.mkdir(exist_ok=True)
        (folder / "lock").touch()
    run(2, check_offload, adam)


@needs("deepspeed")
@pytest.mark.parametrize(("backend", "world_size"), worlds(gloo=(1, 2, 3, 4), nccl=(1, 2, 4)))
def test_our_decoder_under_zero3_takes_the_steps_of_one_process(backend: str, world_size: int) -> None:
    run(world_size, check_engine, "deepspeed", world_size, backend=backend)


@needs("deepspeed", "transformers", "accelerate")
@pytest.mark.parametrize("engine", ["hf_deepspeed", "hf_trainer", WITH_TRL])
@pytest.mark.parametrize(("backend", "world_size"), worlds(gloo=(1, 2, 4), nccl=(1, 2, 4)))
def test_a_hugging_face_model_takes_the_steps_of_ours_on_one_process(
    backend: str, world_size: int, engine: str
) -> None:
    run(world_size, check_engine, engine, world_size, backend=backend)


def check_fit(rank: int, name: str) -> None:
    """Attention is computed in the last layer alone, forward, again and backward; all else is sent as ever."""
    as_a_rank(rank, 2)
    single = replace(RECOMPUTED, warmup_steps=1, timed_steps=1, single_step=True)
    config = trial(MethodConfig(HF), 2, engine=EngineConfig(name), workload=single, kernel=KernelConfig("cpu_flash"))
    fit = replace(config, workload=replace(single, fit=True))
    real, fits = (train_step.run(job(each)) for each in (config, fit))
    assert fits.counts == real.counts
    in_one_layer = {op: calls * config.model.num_layers for op, calls in fits.work.other_ops.items()}
    assert in_one_layer == real.work.other_ops != {}
    columns = assembled(fit, fits)
    assert columns["flags"][-2:] == ["single_step", "fit"]
    assert {name for name in TIMES if columns.get(name) is not None} == set()
    assert tensors_left() == []


@needs("deepspeed", "transformers", "accelerate")
@pytest.mark.parametrize("engine", ["hf_deepspeed", LONG_WITH_TRL])
def test_what_asks_only_whether_a_step_fits_sends_all_of_it(engine: str) -> None:
    run(2, check_fit, engine)


def check_tiles(rank: int, name: str) -> None:
    """24 local tokens in tiles of 7 or fewer. TRL's loss has tiles of its own."""
    as_a_rank(rank, 2)
    tiles = {"mlp_tile_tokens": 7}
    shared = partial(trial, MethodConfig(HF), 2, engine=EngineConfig(name), kernel=KernelConfig("cpu_flash"))
    if name == "hf_deepspeed":  # a tied head's gradient waits for the embedding's; the last token has no label
        tiles["loss_tile_tokens"] = 7
        check(shared(workload=replace(RECOMPUTED, **tiles, micro_batches=2), model=LLAMA, dtype="bfloat16"))
    check(shared(workload=replace(RECOMPUTED, **tiles)))


@needs("deepspeed", "transformers", "accelerate")
@pytest.mark.parametrize("engine", ["hf_deepspeed", LONG_WITH_TRL])
def test_tiles_take_the_steps_of_one_process(engine: str) -> None:
    run(2, check_tiles, engine)


def counts_of(engine: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes of one rank's ledger step: 45 tokens padded to 46, on two ranks."""
    config = trial(MethodConfig(HF), 2, seq_len=45, engine=EngineConfig(engine), kernel=KernelConfig("cpu_flash"))
    return {key: (calls, int(size)) for key, (calls, size) in train_step.run(job(config)).counts.items()}


def check_collectives_of_trl(rank: int) -> None:
    as_a_rank(rank, 2)
    trainer, trl = counts_of("hf_trainer"), counts_of("trl_sft")
    key = ("parameters", "all_gather")
    metrics = 8 + 4 + 8 + 8  # bytes: labelled tokens, entropy, correct predictions, tokens
    attention_mask = 46 * 8  # bytes: the loader's adapter sends it with the tokens
    calls, size = trl.pop(key)
    assert (calls - trainer[key][0], size - trainer.pop(key)[1]) == (4 + 1, metrics + attention_mask)
    assert trl == trainer


@needs("deepspeed", "transformers", "accelerate", "trl")
def test_trl_gathers_its_metrics_and_an_attention_mask_and_nothing_else() -> None:
    run(2, check_collectives_of_trl)


def check_dtype_of_the_sum(rank: int) -> None:
    as_a_rank(rank, 1)
    engines = []
    real = zero3.tag_phases

    def keep(engine: Any) -> None:
        engines.append((engine.gradient_accumulation_steps(), engine.optimizer.gradient_accumulation_dtype))
        real(engine)

    for dtype in ("float32", "bfloat16"):
        config = trial(MethodConfig("single"), 1, dtype=dtype, workload=THREE, engine=EngineConfig("deepspeed"))
        with mock.patch.object(zero3, "tag_phases", keep):
            here = job(config)
            training_step.prove(config, here.mesh, here.device)
    assert engines == [(3, torch.float32), (3, torch.bfloat16), (3, torch.float32)]


@needs("deepspeed")
def test_zero3_sums_the_gradients_of_micro_batches_in_its_parameters_dtype() -> None:
    run(1, check_dtype_of_the_sum)


def check_silence(rank: int) -> None:
    as_a_rank(rank, 1)
    os.environ.pop("CI", None)  # there TRL is silent anyway
    from huggingface_hub.utils import _telemetry  # pyright: ignore[reportMissingImports]

    train_step.run(job(hugging_face_cases("trl_sft", 1)[0]))
    assert _telemetry._TELEMETRY_THREAD is None
    assert _telemetry._TELEMETRY_QUEUE.empty()


@needs("deepspeed", "transformers", "accelerate", "trl")
def test_a_trial_of_trl_reports_to_nobody() -> None:
    run(1, check_silence)
