"""`doctor --gpus`: measures each GPU of a host or of several, each pair and all, and names what is slow or limited."""

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from sp_bench import handover, hardware, kernels
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.config.shape import AttentionShape
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.device_rates import DeviceRates
from sp_bench.costs.flags import MAX_UNEVEN
from sp_bench.driver import devices, nodes
from sp_bench.driver.progress import console
from sp_bench.driver.ranks import Ranks
from sp_bench.formats import GIB, counted
from sp_bench.planning import allocation, plan
from sp_bench.planning.overrides import THIS_DEVICE
from sp_bench.rows import store

LIMIT_S = 300.0  # of all ranks; they take about a minute
POLL_S = 0.2
KERNELS = ("cudnn", "sdpa_flash")  # the first that runs on these GPUs
HARMLESS = ("sw_power_cap", "sync_boost")  # a GPU under load is at its power limit
Key = TypeVar("Key")


@dataclass(frozen=True)
class Device:
    """A GPU, or a rank on processors."""

    name: str  # GPU 3 (GPU-c6489789) of node7
    products_flops_per_s: float
    attention_flops_per_s: float
    state: Mapping[str, Any]  # as `device_state` of a row, with its power limit and the usual one; empty on processors
    host: str


@dataclass(frozen=True)
class Health:
    """What was measured on a host, or on several."""

    host: str  # node7, or node7 and node8
    devices: tuple[Device, ...] = ()
    pair_bytes_per_s: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by the names of both devices
    all_bytes_per_s: float | None = None  # None: one device
    broken: tuple[str, ...] = ()  # devices on which the measurement failed, and how

    def pairs(self, *, between_hosts: bool) -> dict[tuple[str, str], float]:
        """`pair_bytes_per_s` of the pairs of two hosts, or of the others."""
        host = {device.name: device.host for device in self.devices}
        return {(a, b): r for (a, b), r in self.pair_bytes_per_s.items() if (host[a] != host[b]) == between_hosts}

    def as_json(self) -> dict[str, Any]:
        pairs = [{"devices": pair, "bytes_per_s": rate} for pair, rate in self.pair_bytes_per_s.items()]
        return {**asdict(self), "pair_bytes_per_s": pairs}


def here(num_nodes: int) -> list[str]:
    """Overrides for the GPUs of this machine, or of as many machines like this one.

    Raises:
        ConfigError: there are none, or no kernel runs on them.
    """
    found = hardware.gpus()
    if not found or not found.devices:
        raise ConfigError(f"--gpus: {found.problem if found and found.problem else 'no GPU here'}")
    shape = AttentionShape(1, 32768, 32, 8, 128, True, "bfloat16")
    kernel = next((name for name in KERNELS if not kernels.get(name).unsupported_reason(shape, "cuda")), None)
    if kernel is None:
        raise ConfigError(f"--gpus: none of {', '.join(KERNELS)} runs on these GPUs; add kernel=NAME dtype=NAME")
    attention = ("model=llama3_8b", f"seq_len={shape.seq_len}", f"kernel={kernel}", "dtype=bfloat16")
    return [
        "method=ring",
        f"hardware={THIS_DEVICE}",
        "fabric=nvlink" if num_nodes == 1 else "fabric=network",
        f"sp_size={num_nodes * len(found.devices)}",
        *attention,
    ]


def measure(config: TrialConfig, folder: Path, say: Callable[[str], None]) -> Health:
    """Measure the devices of a trial at the trial's shape of attention.

    folder: the campaign's, which all hosts of a trial over several share. say: called with what is done.

    Raises:
        ConfigError: it needs more hosts or devices than are here.
    """
    with _ready(config, folder, say) as (ranks, environments, root), tempfile.TemporaryDirectory(dir=root) as own:
        hosts, names = _places(config, environments)
        trial = Path(own) / "trials" / "health"  # as deep as that of a trial
        trial.mkdir(parents=True)
        broken = _run(ranks, handover.write_trial(trial, config, 0), config, names, say)
        record = handover.read_record(trial)
    if broken or record is None:
        return Health(_and(hosts), broken=tuple(broken) or ("the ranks handed over nothing",))
    return of_record(hosts, names, record)


@contextmanager
def _ready(
    config: TrialConfig, folder: Path, say: Callable[[str], None]
) -> Iterator[tuple[Ranks | nodes.SpreadRanks, Sequence[Mapping[str, Any]], Path | None]]:
    """While open, no other run measures on these devices. Yields what starts the ranks, the environment of each host,
    and where all hosts see one folder; None: anywhere.

    Raises:
        ConfigError: a host is missing.
    """
    device, num_hosts = config.hardware.device, config.num_hosts
    found = hardware.gpus() if device == "cuda" else None
    own, environment = (
        [gpu.uuid for gpu in found.devices] if found else ["cpu"],
        hardware.environment(device, os.environ),
    )
    if num_hosts == 1:
        with devices.reserved(own, _no_check, say):
            yield Ranks(), [environment], None
        return
    if reason := plan.hosts_reason(config, allocation.here().num_hosts):
        raise ConfigError(f"--gpus: {reason}")
    with (
        nodes.joined(allocation.here(), folder, environment, _no_check) as joined,
        joined.reserved(num_hosts, own, [device], _no_check, say),
    ):
        yield joined.ranks(num_hosts), joined.environments(num_hosts), folder.absolute() / store.WORK


def _no_check() -> None:
    """Nothing ends the wait for other runs but a signal."""


def _places(config: TrialConfig, environments: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The host and the device of each rank, in words.

    Raises:
        ConfigError: a host lacks devices.
    """
    hosts, names = [], []
    for node, each in enumerate(environments):
        host = each["hostname"] if len(environments) == 1 else f"node {node} ({each['hostname']})"
        uuids = each["device_uuids"]
        if config.gpus_per_node > len(uuids):
            raise ConfigError(f"--gpus: {config.gpus_per_node} GPUs of each host asked, and {host} has {len(uuids)}")
        for place in range(config.processes_per_host):
            device = f"GPU {place} ({uuids[place][:12]})" if config.gpus_per_node else f"rank {len(names)}"
            hosts.append(host)
            names.append(f"{device} of {host}")
    return hosts, names


def _run(
    ranks: Ranks | nodes.SpreadRanks, trial: Path, config: TrialConfig, names: Sequence[str], say: Callable[[str], None]
) -> list[str]:
    """Run the ranks to their end. Returns whose failed and how, or who did not end in time."""
    folder, start = trial.parent, time.monotonic()
    try:
        ranks.start(
            [sys.executable, "-P", "-m", "sp_bench.measure.health", str(trial)], config, folder, devices.new_token()
        )
        while True:
            exits = list(ranks.exits)
            events = handover.read_events(folder)
            last = {event.rank: event.name for event in events if event.name != "failed"}
            if failed := [each for each in exits if each.code != 0]:
                first = failed[0]  # the others fail because they wait for it
                said = {event.rank: event.reason for event in events if event.name == "failed"}
                words = said.get(first.rank) or f"exit code {first.code}"
                return [f"{names[first.rank]}: failed in {last.get(first.rank, 'its start')}: {shown(words, 300)}"]
            if len(exits) == config.world_size:
                return []
            if time.monotonic() - start > LIMIT_S:
                behind = sorted(set(range(config.world_size)) - {each.rank for each in exits})
                return [f"{names[r]}: no end of {last.get(r, 'its start')} within {LIMIT_S:.0f} s" for r in behind]
            say(f"{len(names)} devices: {last.get(0, 'start')}, {time.monotonic() - start:.0f} s of about a minute")
            time.sleep(POLL_S)
    finally:
        ranks.kill()
        ranks.join()


def of_record(hosts: Sequence[str], names: Sequence[str], record: Mapping[str, Any]) -> Health:
    """What the ranks measured, with rates for times."""
    per_s, of_ranks = record["message_bytes"] * 1e3, record["ranks"]
    pair_ms = [  # of the slower of the two; the others have None
        max(ms for ms in of_pair if ms is not None)
        for of_pair in zip(*(each["pair_ms"] for each in of_ranks), strict=True)
    ]
    all_ms = [each["all_ms"] for each in of_ranks if each["all_ms"] is not None]
    return Health(
        host=_and(hosts),
        devices=tuple(
            Device(name, each["products_flops_per_s"], each["attention_flops_per_s"], each["state"], host)
            for host, name, each in zip(hosts, names, of_ranks, strict=True)
        ),
        pair_bytes_per_s={pair: per_s / ms for pair, ms in zip(itertools.combinations(names, 2), pair_ms, strict=True)},
        all_bytes_per_s=per_s / max(all_ms) if all_ms else None,
    )


def _and(hosts: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(hosts))


def complaints(health: Health, expected: DeviceRates) -> Iterator[str]:
    """What is wrong, each with the device or the host: a rate that is over 10% below the expected one or the median of
    all (of pairs: of those inside hosts, or between them), a power limit below the usual one, a slowdown for heat or
    power, a rank that failed."""
    yield from health.broken
    for rate, words in (("products_flops_per_s", "matrix products"), ("attention_flops_per_s", "attention")):
        measured = {device.name: getattr(device, rate) for device in health.devices}
        for name, usual in _slow(measured, measured.values(), getattr(expected, rate)).items():
            yield f"{name}: {_below(measured[name], usual, 1e12, 'TFLOP/s')} in {words}"
    names = [device.name for device in health.devices]
    inside, between = health.pairs(between_hosts=False), health.pairs(between_hosts=True)
    yield from _slow_links(names, inside, expected.pair_bytes_per_s, "each other one")
    yield from _slow_links(names, between, None, "each one of other hosts")
    rate, usual = health.all_bytes_per_s, None if between else expected.all_bytes_per_s
    if rate is not None and usual is not None and rate * MAX_UNEVEN < usual:
        yield f"all of {health.host}: {_below(rate, usual, GIB, 'GiB/s')} in an all-to-all"
    for device in health.devices:
        limit_w, usual_w = (device.state.get(key) for key in ("power_limit_w", "usual_power_limit_w"))
        if limit_w is not None and usual_w is not None and limit_w < usual_w:
            yield f"{device.name}: its power limit is {limit_w:,.0f} W, and {usual_w:,.0f} W is usual"
        if reasons := [each for each in device.state.get("throttle_reasons") or () if each not in HARMLESS]:
            yield f"{device.name}: slowed down under load ({', '.join(reasons)})"


def _slow_links(
    names: Sequence[str], pairs: Mapping[tuple[str, str], float], reference: float | None, others: str
) -> Iterator[str]:
    """Names the devices whose links are all slow, and the slow links between the others. Usual is the best link of a
    device in the middle: one slow host of three has most of the links."""
    own = {name: [pair for pair in pairs if name in pair] for name in names} if len(pairs) > 1 else {}
    best = {name: max(of, key=pairs.__getitem__) for name, of in own.items() if of}
    slow = _slow(pairs, [pairs[pair] for pair in best.values()], reference)
    whole = [name for name, pair in best.items() if pair in slow]
    for name in whole:
        yield f"{name}: {_below(pairs[best[name]], slow[best[name]], GIB, 'GiB/s')} with {others}, at best"
    for pair in slow:
        if not set(pair) & set(whole):
            yield f"{' and '.join(pair)}: {_below(pairs[pair], slow[pair], GIB, 'GiB/s')} between them"


def _slow(measured: Mapping[Key, float], alike: Collection[float], reference: float | None) -> dict[Key, float]:
    """Who is over 10% below the reference, or the median of those alike -> the larger of these two."""
    usual = max(reference or 0.0, statistics.median_high(alike) if alike else 0.0)
    return {key: usual for key, rate in measured.items() if rate * MAX_UNEVEN < usual}


def _below(rate: float, usual: float, unit: float, name: str) -> str:
    return f"{_three_digits(rate / unit)} {name}, {1 - rate / usual:.0%} below {_three_digits(usual / unit)}"


def show(health: Health, expected: DeviceRates, wrong: Sequence[str]) -> None:
    """Print a line a device, what the rates were held against, and the verdict: its `complaints`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("device", no_wrap=True)
    slowest = {"slowest pair (GiB/s)": health.pairs(between_hosts=False)}
    if between := health.pairs(between_hosts=True):
        slowest["between hosts (GiB/s)"] = between
    for heading in ("products (TFLOP/s)", "attention (TFLOP/s)", *slowest, "clock (MHz)", "power limit (W)"):
        table.add_column(heading, justify="right")
    for device in health.devices:
        links = [
            min((r / GIB for pair, r in of.items() if device.name in pair), default=None) for of in slowest.values()
        ]
        rates = (device.products_flops_per_s / 1e12, device.attention_flops_per_s / 1e12, *links)
        state = (device.state.get("sm_clock_mhz"), device.state.get("power_limit_w"))
        table.add_row(
            device.name, *map(_three_digits, rates), *("-" if each is None else f"{each:.0f}" for each in state)
        )
    if health.devices:
        console().print(table)
    if health.all_bytes_per_s is not None:
        console().print(f"all-to-all of all: {_three_digits(health.all_bytes_per_s / GIB)} GiB/s that each sends")
    console().print(expected.source or "no rows of such devices: they are compared with one another alone")
    for words in wrong:
        console().print(f"slow or limited: {words}", style="red", markup=False, highlight=False)
    if not wrong:
        console().print(f"{health.host}: {counted(len(health.devices), 'device')} passed", style="green", markup=False)


def _three_digits(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
