"""The collective workload on real ranks: right content, predicted bytes and a curve. Wrong content is `incorrect`."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import here, run, worlds
from trials import job, row

from sp_bench.attention.exchange import Collectives, Message
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import FabricConfig, HardwareConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.model import ModelConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import WorkloadConfig
from sp_bench.costs import message_sizes
from sp_bench.measure.incorrect import Incorrect
from sp_bench.workloads import collective

MODEL = ModelConfig("tiny", 1, 64, 64, 8, 2, 16, 256, 1e4, 1e-5, False, False, True)
METHODS = ("ulysses", "ring", "all_gather")


def trial(method: str, dtype: str) -> TrialConfig:
    backend, device = dist.get_backend(), here().type
    return TrialConfig(
        MethodConfig(method),
        KernelConfig("math"),
        MODEL,
        WorkloadConfig("collective", "exchange", False, 1, 3, 1, max_message_bytes=2**20),
        FabricConfig(backend, backend),  # pyright: ignore[reportArgumentType]
        HardwareConfig(device, device),  # pyright: ignore[reportArgumentType]
        batch_size=1,
        seq_len=128,
        sp_size=dist.get_world_size(),
        dp_replicate_size=1,
        dp_shard_size=1,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        seed=0,
    )


def check_rows(rank: int) -> None:
    for method, dtype in zip(METHODS, ("bfloat16", "float64", "float32"), strict=True):
        config = trial(method, dtype)
        made = row(config)
        sizes = [size.sent_bytes for size in message_sizes.message_sizes(config)]
        assert [point["message_bytes"] for point in made["curve"]] == sizes
        assert len(sizes) == 3
        assert made["comm_predicted_bytes"] == made["comm_counted_bytes"] == sizes[-1]
        assert [(c["phase"], c["op"], c["calls"]) for c in made["comm"]] == [("forward", message_sizes.OPS[method], 1)]
        assert made["median_step_ms"] == made["curve"][-1]["ms"]
        assert all(point["ms"] > 0 for point in made["curve"])
        fitted = message_sizes.fit_line(sizes, [point["ms"] for point in made["curve"]])
        assert (made["latency_us"], made["bandwidth_bytes_per_s"]) == (
            fitted.latency_us,
            fitted.bandwidth_bytes_per_s,
        )
        empty = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "hfu", "model_flops", "hardware_flops")
        assert all(made.get(name) is None for name in (*empty, "attention_flops_per_s"))


def silent_all_to_all(self, sent):
    return Message(sent, [t.clone() for t in sent], [])


def rotated_all_to_all(self, sent):
    (received,) = right_all_to_all(self, sent).wait_all()
    return Message(sent, [received.roll(1, -1)], [])


def swapped_all_gather(self, tensor):
    gathered = right_all_gather(self, tensor).wait()
    return Message([tensor], [gathered.unflatten(0, (self.group.size(), -1)).roll(1, 0).flatten(0, 1)], [])


def wrong_last_element(self, tensor):
    gathered = right_all_gather(self, tensor).wait()
    if self.group.rank() == self.group.size() - 1:
        gathered[-1] += 1
    return Message([tensor], [gathered], [])


def backward_shift(self, sent):
    """A fault: the next rank's content arrives where the previous rank's belongs."""
    received = sent
    for _ in range(self.group.size() - 1):
        received = right_shift(self, received).wait_all()
    return Message(sent, received, [])


def chatty_shift(self, sent):
    """A fault: the content is right, but travels twice."""
    right_shift(self, sent).wait_all()
    return right_shift(self, sent)


right_shift, right_all_gather, right_all_to_all = Collectives.shift, Collectives.all_gather, Collectives.all_to_all

FAULTS = [
    ("ulysses", "all_to_all", silent_all_to_all, "all_to_all of {bytes} bytes"),
    ("ulysses", "all_to_all", rotated_all_to_all, "all_to_all of {bytes} bytes"),
    ("all_gather", "all_gather", swapped_all_gather, "all_gather of {bytes} bytes"),
    ("all_gather", "all_gather", wrong_last_element, "ranks {last} did not receive what their peers sent"),
    ("ring", "shift", chatty_shift, "bytes sent by rank 0 differ from the closed form"),
]


def check_faults(rank: int) -> None:
    faults = list(FAULTS)
    if dist.get_world_size() > 2:  # with two ranks the next one is the previous one
        faults.append(("ring", "shift", backward_shift, "send of 65536 bytes: ranks 0, 1, 2"))
    for method, name, fault, message in faults:
        print(f"fault: {fault.__name__}")  # names the culprit, should it go unnoticed
        config = trial(method, "bfloat16")
        smallest = message_sizes.message_sizes(config)[0].sent_bytes
        expected = message.format(last=dist.get_world_size() - 1, bytes=smallest)
        with patch.object(Collectives, name, fault), pytest.raises(Incorrect, match=expected):
            row(config)


def check_stamps(rank: int) -> None:
    """No two slices of a group are equal, a slice shifted within itself differs too, and the narrowest dtype holds all
    values."""
    narrow, wide = job(trial("ulysses", "bfloat16")), job(trial("ulysses", "float64"))
    size = message_sizes.message_sizes(narrow.config)[0]
    ranks = range(narrow.config.sp_size)
    slices = [collective.stamped(narrow, size, sender, receiver) for sender in ranks for receiver in ranks]
    exact = [collective.stamped(wide, size, sender, receiver) for sender in ranks for receiver in ranks]
    for i, (one, same) in enumerate(zip(slices, exact, strict=True)):
        assert one.nbytes == same.nbytes == size.slice_bytes
        assert torch.equal(one[: len(same)].double(), same)
        assert not torch.equal(one, one.roll(1))
        assert not any(torch.equal(one, other) for other in slices[:i])


def check_all(rank: int) -> None:
    check_stamps(rank)
    check_rows(rank)
    check_faults(rank)


@pytest.mark.parametrize(("backend", "world_size"), worlds(gloo=(2, 3, 4), nccl=(2, 4)))
def test_each_primitive_is_proven_counted_and_timed_and_wrong_content_is_incorrect(backend, world_size):
    run(world_size, check_all, backend=backend)
