"""`doctor --gpus`: measures each GPU of this host, each pair and all together, and names what is slow or limited."""

import itertools
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from sp_bench import handover, hardware, kernels
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.config.trial import AttentionShape, TrialConfig
from sp_bench.costs.flags import MAX_UNEVEN
from sp_bench.driver import devices
from sp_bench.driver.overrides import THIS_DEVICE
from sp_bench.driver.progress import console
from sp_bench.driver.ranks import Ranks
from sp_bench.formats import GIB, counted

LIMIT_S = 300.0  # of all ranks; they take about a minute
POLL_S = 0.2
KERNELS = ("cudnn", "sdpa_flash")  # the first that runs on these GPUs
HARMLESS = ("sw_power_cap", "sync_boost")  # a GPU under load is at its power limit
Key = TypeVar("Key")


@dataclass(frozen=True)
class Rates:
    """What devices of one kind reach. None: unknown."""

    products_flops_per_s: float | None = None
    attention_flops_per_s: float | None = None
    pair_bytes_per_s: float | None = None  # that each of two ranks sends the other
    all_bytes_per_s: float | None = None  # that each rank sends in an all-to-all
    source: str = ""


@dataclass(frozen=True)
class Device:
    """A GPU, or a rank on processors."""

    name: str  # GPU 3 (GPU-c6489789)
    products_flops_per_s: float
    attention_flops_per_s: float
    state: Mapping[str, Any]  # as `device_state` of a row, with its power limit and the usual one; empty on processors


@dataclass(frozen=True)
class Health:
    """What was measured on a host."""

    host: str
    devices: tuple[Device, ...] = ()
    pair_bytes_per_s: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by the names of both devices
    all_bytes_per_s: float | None = None  # None: one device
    broken: tuple[str, ...] = ()  # devices on which the measurement failed, and how

    def as_json(self) -> dict[str, Any]:
        pairs = [{"devices": pair, "bytes_per_s": rate} for pair, rate in self.pair_bytes_per_s.items()]
        return {**asdict(self), "pair_bytes_per_s": pairs}


def here() -> list[str]:
    """Overrides for the GPUs of this machine.

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
    return ["method=ring", f"hardware={THIS_DEVICE}", "fabric=nvlink", f"sp_size={len(found.devices)}", *attention]


def measure(config: TrialConfig, say: Callable[[str], None]) -> Health:
    """Measure the devices of a trial on this host, at the trial's shape of attention. say: called with what is done.

    Raises:
        ConfigError: it needs other hosts, or more devices than are here.
    """
    found = hardware.gpus() if config.hardware.device == "cuda" else None
    uuids = [gpu.uuid for gpu in found.devices] if found else ["cpu"]
    if config.num_hosts > 1 or (found and len(uuids) < config.world_size):
        raise ConfigError(f"--gpus measures the {len(uuids)} GPUs of this host; start it on each host, as by srun")
    host = socket.gethostname()
    names = [f"GPU {place} ({uuids[place][:12]})" if found else f"rank {place}" for place in range(config.world_size)]
    with tempfile.TemporaryDirectory() as root, devices.reserved(uuids, lambda: None, say):
        folder = Path(root) / "trials" / "health"  # as deep as that of a trial
        folder.mkdir(parents=True)
        broken = _run(handover.write_trial(folder, config, 0), config, names, say)
        record = handover.read_record(folder)
    if broken or record is None:
        return Health(host, broken=tuple(broken) or ("the ranks handed over nothing",))
    return of_record(host, names, record)


def _run(trial: Path, config: TrialConfig, names: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Run the ranks to their end. Returns whose failed and how, or who did not end in time."""
    folder, ranks, start = trial.parent, Ranks(), time.monotonic()
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


def of_record(host: str, names: Sequence[str], record: Mapping[str, Any]) -> Health:
    """What the ranks measured, with rates for times."""
    per_s, of_ranks = record["message_bytes"] * 1e3, record["ranks"]
    pair_ms = [  # of the slower of the two; the others have None
        max(ms for ms in of_pair if ms is not None)
        for of_pair in zip(*(each["pair_ms"] for each in of_ranks), strict=True)
    ]
    all_ms = [each["all_ms"] for each in of_ranks if each["all_ms"] is not None]
    return Health(
        host=host,
        devices=tuple(
            Device(name, each["products_flops_per_s"], each["attention_flops_per_s"], each["state"])
            for name, each in zip(names, of_ranks, strict=True)
        ),
        pair_bytes_per_s={pair: per_s / ms for pair, ms in zip(itertools.combinations(names, 2), pair_ms, strict=True)},
        all_bytes_per_s=per_s / max(all_ms) if all_ms else None,
    )


def complaints(health: Health, expected: Rates) -> list[str]:
    """What is wrong, each with the device or the host: a rate that is over 10% below the expected one or the median of
    all of this host, a power limit below the usual one, a slowdown for heat or power, a rank that failed."""
    return [f"{words}, on {health.host}" for words in _complaints(health, expected)]


def _complaints(health: Health, expected: Rates) -> Iterator[str]:
    yield from health.broken
    for rate, words in (("products_flops_per_s", "matrix products"), ("attention_flops_per_s", "attention")):
        measured = {device.name: getattr(device, rate) for device in health.devices}
        for name, usual in _slow(measured, getattr(expected, rate)).items():
            yield f"{name}: {_below(measured[name], usual, 1e12, 'TFLOP/s')} in {words}"
    pairs = health.pair_bytes_per_s
    slow = _slow(pairs, expected.pair_bytes_per_s)
    whole = [d.name for d in health.devices if len(pairs) > 1 and all(pair in slow for pair in pairs if d.name in pair)]
    for name in whole:
        best = max((pair for pair in slow if name in pair), key=pairs.__getitem__)
        yield f"{name}: {_below(pairs[best], slow[best], GIB, 'GiB/s')} with each other one, at best"
    for pair in slow:
        if not set(pair) & set(whole):
            yield f"{' and '.join(pair)}: {_below(pairs[pair], slow[pair], GIB, 'GiB/s')} between them"
    rate, usual = health.all_bytes_per_s, expected.all_bytes_per_s
    if rate is not None and usual is not None and rate * MAX_UNEVEN < usual:
        yield f"all together: {_below(rate, usual, GIB, 'GiB/s')} in an all-to-all"
    for device in health.devices:
        limit_w, usual_w = (device.state.get(key) for key in ("power_limit_w", "usual_power_limit_w"))
        if limit_w is not None and usual_w is not None and limit_w < usual_w:
            yield f"{device.name}: its power limit is {limit_w:,.0f} W, and {usual_w:,.0f} W is usual"
        if reasons := [each for each in device.state.get("throttle_reasons") or () if each not in HARMLESS]:
            yield f"{device.name}: slowed down under load ({', '.join(reasons)})"


def _slow(measured: Mapping[Key, float], reference: float | None) -> dict[Key, float]:
    """Who is over 10% below the reference, or the median of all -> the larger of these two."""
    usual = max(reference or 0.0, statistics.median_high(measured.values()) if measured else 0.0)
    return {key: usual for key, rate in measured.items() if rate * MAX_UNEVEN < usual}


def _below(rate: float, usual: float, unit: float, name: str) -> str:
    return f"{rate / unit:,.0f} {name}, {1 - rate / usual:.0%} below {usual / unit:,.0f}"


def show(health: Health, expected: Rates, wrong: Sequence[str]) -> None:
    """Print a line a device, what the rates were held against, and the verdict: its `complaints`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("device", no_wrap=True)
    for heading in (
        "products (TFLOP/s)",
        "attention (TFLOP/s)",
        "slowest pair (GiB/s)",
        "clock (MHz)",
        "power limit (W)",
    ):
        table.add_column(heading, justify="right")
    for device in health.devices:
        of_pairs = [rate / GIB for pair, rate in health.pair_bytes_per_s.items() if device.name in pair]
        rates = (device.products_flops_per_s / 1e12, device.attention_flops_per_s / 1e12, min(of_pairs, default=None))
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
