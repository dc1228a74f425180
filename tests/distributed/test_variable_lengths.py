"""Which libraries are right when the length changes from batch to batch, with `engine.variable_seq_len` and without:
docs/ENGINES.md's table.

A tiny Qwen3 on 2 gloo ranks in fp32 with SGD, one sequence a step. Each step's loss and gradient norm are compared with
one process on the same texts, without padding. So lost tokens, wrong positions and labels of padding show.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from ranks import run
from test_engines import HF, WITH_TRL, as_a_rank, needs
from torch import Tensor
from torch.nn import functional as F
from trials import PARITY, job, trial

from sp_bench import engines
from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.method import MethodConfig
from sp_bench.workloads import parity

LONGEST = 64
# DeepSpeed's loader exchanges the sequences of two steps at a time, one of each rank. Shorter, longer again, one that 2
# ranks cannot share evenly, and one of which the second rank has padding alone, where all are padded.
EVEN = (64, 64, 48, 48, 64, 64, 45, 45, 24, 24)
UNEVEN = (64, 48, 45, 64)
LIBRARIES = needs("transformers", "accelerate", "deepspeed")
ENGINES = pytest.mark.parametrize("engine", ["hf_deepspeed", "hf_trainer", WITH_TRL])


def padded(texts: Sequence[Tensor]) -> list[Tensor]:
    """As long as the longest; padding is no label."""
    # the last token of a text is no label in these engines, and would become one before the padding
    return [F.pad(text[:, :-1], (0, LONGEST + 2 - text.shape[1]), value=~0) for text in texts]


def check(engine: str, lengths: Sequence[int], *, variable: bool, pads: bool) -> None:
    """
    Raises:
        Incorrect: a step differs from one process.
    """
    options = {"engine": EngineConfig(engine, variable_seq_len=variable), "kernel": KernelConfig("cpu_flash")}
    config = trial(MethodConfig(HF), 2, seq_len=LONGEST, workload=PARITY, **options)
    mine, run_engine = job(config), engines.get(engine).run
    texts = parity.texts([replace(config, seq_len=length) for length in lengths])
    expected, again = parity.reference(config, texts, mine.device)
    given = padded(texts) if pads else texts
    taken = run_engine(config, given, mine.mesh, mine.device, lambda: None, token_losses=0)
    parity.compare(parity.reported(taken), expected, again)


def check_right(rank: int, engine: str) -> None:
    as_a_rank(rank, 2)
    check(engine, EVEN, variable=True, pads=False)
    check(engine, EVEN, variable=True, pads=True)
    check(engine, EVEN, variable=False, pads=True)
    check(engine, UNEVEN, variable=False, pads=True)


@LIBRARIES
@ENGINES
def test_lengths_that_change_for_all_ranks_are_right_and_so_is_padding(engine: str) -> None:
    run(2, check_right, engine)


def check_another_length(rank: int, engine: str) -> None:
    as_a_rank(rank, 2)
    with pytest.raises(AssertionError, match="query input tensor does not match the required shape"):
        check(engine, EVEN, variable=False, pads=False)


@LIBRARIES
@ENGINES
def test_an_attention_of_one_length_refuses_another(engine: str) -> None:
    run(2, check_another_length, engine)


def check_uneven(rank: int, engine: str) -> None:
    as_a_rank(rank, 2)
    with pytest.raises(RuntimeError, match="allgather: invalid tensor size"):
        check(engine, UNEVEN, variable=True, pads=False)


@LIBRARIES
@ENGINES
def test_on_gloo_deepspeeds_loader_refuses_ranks_whose_sequences_differ_in_length(engine: str) -> None:
    run(2, check_uneven, engine)
