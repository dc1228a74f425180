"""Options of engines from outside: a trial whose library ignores one must not end as `ok`.

A test is skipped if its libraries are not installed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run
from test_engines import HF, LONG_WITH_TRL, as_a_rank, needs
from trials import TRAIN, assembled, job, trial

from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.engines import hugging_face, trl_sft, zero3
from sp_bench.measure.incorrect import Incorrect
from sp_bench.training import train
from sp_bench.workloads import train_step

LIBRARIES = needs("deepspeed", "transformers", "accelerate")
STACKS = pytest.mark.parametrize(
    "engine", ["hf_deepspeed", pytest.param("hf_trainer", marks=pytest.mark.faults), LONG_WITH_TRL]
)
RECOMPUTED = replace(TRAIN, activation_checkpointing="full")


FLASH = KernelConfig("cpu_flash")
PRODUCTS_DIFFER = "FLOPs of matrix products outside attention"


def alone(engine: str, **fields: Any) -> TrialConfig:
    """One rank with 48 tokens of a sequence."""
    return trial(MethodConfig("single"), 1, **{"engine": EngineConfig(engine), "kernel": FLASH} | fields)


def row(config: TrialConfig) -> dict[str, Any]:
    return assembled(config, train_step.run(job(config)))


def refused(config: TrialConfig, reason: str) -> None:
    with pytest.raises(Incorrect, match=reason):
        row(config)


@contextmanager
def offload_from_a_cpu(**options: Any) -> Iterator[None]:
    """TRL's activation offloading, which takes the CPU for an accelerator: it copies from host memory to host memory,
    none of it page-locked."""
    from trl.models.activation_offloading import (  # pyright: ignore[reportMissingImports]
        get_act_offloading_ctx_manager,
    )

    open_context = partial(get_act_offloading_ctx_manager, use_pin_memory=False, use_streams=False, **options)
    with (
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cpu")),
        mock.patch("trl.trainer.sft_trainer.get_act_offloading_ctx_manager", open_context),
    ):
        yield


def check_offload_of_trl(rank: int, smallest: int) -> None:
    as_a_rank(rank, 1)
    real = trl_sft.stack

    def offloading(config: TrialConfig) -> Any:
        stack = real(config)
        return replace(stack, own_arguments=stack.own_arguments | {"activation_offloading": True})

    with (
        mock.patch.object(trl_sft, "stack", offloading),
        offload_from_a_cpu(min_offload_size=smallest),
        pytest.raises(AttributeError, match="'ds_status'"),
    ):
        row(alone("trl_sft", workload=RECOMPUTED))


@needs("deepspeed", "transformers", "accelerate", "trl")
@pytest.mark.parametrize("smallest", [1024, 2**30])  # bytes that are moved; what stays comes back as a plain tensor too
def test_trls_loss_does_not_find_the_head_under_its_own_offloading(smallest: int) -> None:
    """So `workload.checkpoint_offload` is refused. If this fails, TRL can do it: count what it moves, and allow it."""
    run(1, check_offload_of_trl, smallest)


def in_one_tile(name: str, place: int) -> Any:
    """A tiled function of DeepSpeed whose argument at `place`, the number of tiles, is taken for 1."""
    from deepspeed.runtime.sequence_parallel import ulysses_sp  # pyright: ignore[reportMissingImports]

    honest = getattr(ulysses_sp, name)

    def apply(*args: Any) -> Any:
        return honest.apply(*args[:place], 1, *args[place + 1 :])

    return mock.patch.object(ulysses_sp, name, SimpleNamespace(apply=apply))


def no_tiled_mlp() -> Any:
    """Layers keep the MLP that they had."""
    return mock.patch.object(zero3, "tile_mlp")


def check_tiles(rank: int, engine: str) -> None:
    as_a_rank(rank, 1)
    mlp = alone(engine, workload=replace(RECOMPUTED, mlp_tile_tokens=20))
    with in_one_tile("TiledMLP", 3):
        refused(
            mlp, "workload.mlp_tile_tokens=20: DeepSpeed computed 48 tokens at a time, of 1 sequences; leave it out"
        )
    if engine != "hf_deepspeed":
        return
    with no_tiled_mlp():
        refused(mlp, PRODUCTS_DIFFER)
    with in_one_tile("TiledFusedLogitsLoss", 5):
        reason = "workload.loss_tile_tokens=20: DeepSpeed computed 48 tokens at a time"
        refused(alone(engine, workload=replace(TRAIN, loss_tile_tokens=20)), reason)


@LIBRARIES
@STACKS
def test_tiles_that_deepspeed_does_not_make_are_noticed(engine: str) -> None:
    run(1, check_tiles, engine)


def check_recomputation(rank: int, engine: str) -> None:
    from transformers import PreTrainedModel  # pyright: ignore[reportMissingImports]

    as_a_rank(rank, 1)
    with mock.patch.object(PreTrainedModel, "gradient_checkpointing_enable"):
        refused(alone(engine, workload=RECOMPUTED), PRODUCTS_DIFFER)


@LIBRARIES
@STACKS
def test_layers_that_are_not_recomputed_are_noticed(engine: str) -> None:
    run(1, check_recomputation, engine)


def check_fit(rank: int, engine: str) -> None:
    """The model asks transformers for its attention, and does not get the one that was registered."""
    from transformers import AttentionInterface  # pyright: ignore[reportMissingImports]
    from transformers.integrations.sdpa_attention import (  # pyright: ignore[reportMissingImports]
        sdpa_attention_forward,
    )

    as_a_rank(rank, 1)
    single = replace(RECOMPUTED, warmup_steps=1, timed_steps=1, single_step=True, fit=True)
    with mock.patch.object(AttentionInterface, "get_interface", return_value=sdpa_attention_forward):
        refused(alone(engine, workload=single), "fit=true: of 2 layers the last computed its attention 0 times")


@LIBRARIES
@STACKS
def test_attention_that_is_computed_although_it_was_to_be_left_out_is_noticed(engine: str) -> None:
    run(1, check_fit, engine)


def check_variable_lengths(rank: int, engine: str, asked: bool) -> None:
    """DeepSpeed registers its attention for the other kind of lengths."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
        UlyssesSPAttentionHF,
    )

    as_a_rank(rank, 2)
    honest = UlyssesSPAttentionHF.register_with_transformers

    @wraps(honest)
    def register(*args: Any, seq_length_is_variable: bool, **options: Any) -> Any:
        return honest(*args, seq_length_is_variable=not seq_length_is_variable, **options)

    config = trial(MethodConfig(HF), 2, engine=EngineConfig(engine, variable_seq_len=asked), kernel=FLASH)
    with mock.patch.object(UlyssesSPAttentionHF, "register_with_transformers", register):
        refused(config, f"variable_seq_len={asked}: .* has seq_length_is_variable=.{not asked}.; use engine")


@LIBRARIES
@pytest.mark.parametrize(("engine", "asked"), [("hf_deepspeed", True), ("hf_trainer", False)])
def test_an_attention_for_other_lengths_is_noticed(engine: str, asked: bool) -> None:
    run(2, check_variable_lengths, engine, asked)


@contextmanager
def liger_kernel(patch: Callable[[Any], None]) -> Iterator[None]:
    """A Liger that does `patch` to a model."""
    library, module = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    vars(module)["_apply_liger_kernel_to_instance"] = lambda model, **_: patch(model)
    installed = {each.__name__: sys.modules.get(each.__name__) for each in (library, module)}
    sys.modules.update({each.__name__: each for each in (library, module)})
    try:
        yield
    finally:  # and not all of sys.modules, into which torch imports its compiler meanwhile
        for name, before in installed.items():
            del sys.modules[name]
            if before is not None:
                sys.modules[name] = before


def rotation_only(model: Any) -> None:
    theirs = hugging_face._modeling(model)
    theirs.apply_rotary_pos_emb = partial(theirs.apply_rotary_pos_emb)


def all_but_the_norms(model: Any) -> None:
    rotation_only(model)
    for layer in model.model.layers:
        layer.mlp.act_fn.forward = lambda x: x * x.sigmoid()


def everything(model: Any) -> None:
    """As Liger does on a GPU. Not one of these is a kernel, but none runs what transformers does."""
    all_but_the_norms(model)

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * (x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).pow(-0.5))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm, module)


def check_liger(rank: int, engine: str) -> None:
    as_a_rank(rank, 1)
    config = alone(engine, workload=replace(RECOMPUTED, model_code="liger"))
    with liger_kernel(everything):
        row(config)
    with liger_kernel(lambda model: None):  # as Liger does to a model that it does not know
        refused(config, r"model_code=liger: Liger left the rotation of transformers\.models\.qwen3.* as it was; use ")
    replaced = "workload.model_code replaces aten::silu and aten::rsqrt, and in one step a rank ran"
    with liger_kernel(rotation_only):
        refused(config, f"{replaced} .* x aten::rsqrt, 4 x aten::silu$")
    with liger_kernel(all_but_the_norms):
        refused(config, rf"{replaced} \d+ x aten::rsqrt$")


@LIBRARIES
@STACKS
def test_a_liger_that_leaves_the_model_as_it_is_is_noticed(engine: str) -> None:
    run(1, check_liger, engine)


def check_adam(rank: int, engine: str) -> None:
    """torch's AdamW steps in the place of DeepSpeed's, on the same buffer in host memory."""
    as_a_rank(rank, 1)
    config = alone(engine)
    config = replace(config, engine=EngineConfig(engine, optimizer_offload="deepspeed_cpu_adam"))
    honest = zero3.settings

    def settings(config: TrialConfig) -> dict[str, Any]:
        return honest(config) | {"zero_force_ds_cpu_optimizer": False}

    with (
        mock.patch.object(zero3, "settings", settings),
        mock.patch.object(
            zero3, "make_optimizer", lambda model, config: train.make_optimizer(model.parameters(), config.workload)
        ),
    ):
        refused(config, "DeepSpeedCPUAdam on cpu was to update the parameters, and AdamW on cpu did")


@LIBRARIES
@pytest.mark.parametrize("engine", ["hf_deepspeed", "hf_trainer"])
def test_another_adam_in_host_memory_is_noticed(engine: str) -> None:
    run(1, check_adam, engine)
