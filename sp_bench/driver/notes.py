"""The lines that a plan and a run show beside their trials: warnings, packs, searches, GPU time."""

import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sp_bench import hardware, methods
from sp_bench.config.documents import MULTIPLE, from_text
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import TRAINING
from sp_bench.costs import memory
from sp_bench.driver import derived, proven, ranks
from sp_bench.driver.attempt import Campaign
from sp_bench.driver.progress import layout
from sp_bench.driver.searching import Searching
from sp_bench.driver.to_run import TrialState
from sp_bench.formats import cost_text, counted, number
from sp_bench.planning import device_time
from sp_bench.planning.machine import Machine
from sp_bench.planning.plan import Trial
from sp_bench.planning.settings import CampaignConfig
from sp_bench.rows import store


def notes(
    configs: Collection[TrialConfig],
    states: Sequence[TrialState],
    searches: Sequence[Searching],
    campaign: Campaign,
    machine: Machine,
) -> list[str]:
    """All lines, in the order in which they are shown. configs: of trials and of searches."""
    trials = [state.trial for state in states]
    warned = [
        *warnings(trials, len(os.sched_getaffinity(0)), machine.smallest_gpu_bytes),
        *slow_updates(configs),
        *inherited(configs, os.environ),
    ]
    return [
        *(f"warning: {words}" for words in warned),
        *_measured_elsewhere([state.trial for state in states if state.latest is None], campaign),
        *_unknown_rates(trials, machine.gpus),
        *_of_packs(trials),
        *itertools.chain.from_iterable(search.notes for search in searches),
        *_device_time([state.trial for state in states if state.next], searches, machine, campaign.settings),
    ]


def warnings(trials: Iterable[Trial], num_cores: int, gpu_bytes: int | None) -> list[str]:
    """Doubts about trials that will run: too few processors, too little memory, a library with a known fault.

    gpu_bytes: memory of the smallest GPU.
    """
    running = {trial.cell_id: trial.config for trial in trials if trial.unsupported_reason is None}.values()
    found = []
    on_cpus = [c.processes_per_host for c in running if c.hardware.device == "cpu"]
    if crowded := [number for number in on_cpus if number > num_cores]:
        found.append(
            f"{len(crowded)} of {len(running)} cells have up to {max(crowded)} ranks on {num_cores} processors: their "
            "times are of ranks that wait for each other"
        )
    full = []
    for config in running:
        emulated = config.hardware.device_memory_gib
        own = (gpu_bytes or math.inf) / config.hardware.ranks_per_gpu
        limit = min(own, math.inf if emulated is None else emulated * 2**30)
        if config.hardware.device == "cuda" and (needed := _needed_bytes(config)) > limit:
            full.append(needed)
    if full:
        found.append(
            f"{len(full)} of {len(running)} cells will probably end as oom: a rank needs up to "
            f"{max(full) / 2**30:,.1f} GiB, by the memory model where it knows the step, and elsewhere without what "
            "the method and the kernel need"
        )
    doubts = (_doubt(config) for config in running)
    return found + list(dict.fromkeys(filter(None, doubts)))


def inherited(configs: Collection[TrialConfig], variables: Mapping[str, str]) -> list[str]:
    """Warns of variables of this shell that shape what GPU ranks measure and that no fabric file sets: rows are named
    after the fabric, and compared by it."""
    unsaid = {
        f"{name}={value}"
        for config in configs
        if config.hardware.device == "cuda"
        for name, value in hardware.recorded_variables(variables).items()
        if hardware.OF_TRANSPORT_AND_MEMORY.fullmatch(name) and name not in config.fabric.env
    }
    if not unsaid:
        return []
    return [
        f"ranks inherit {', '.join(sorted(unsaid))}, which no fabric of these trials sets: rows do not differ by it in "
        "name. Unset it, or give it a fabric of its own: a file in conf/fabric with it in `env`"
    ]


def slow_updates(configs: Collection[TrialConfig]) -> list[str]:
    """Warns if ranks update parameters in host memory with one thread each."""
    of_one_thread = [
        config
        for config in configs
        if config.workload.name in TRAINING and config.engine.optimizer_offload and config.hardware.device == "cuda"
        if config.hardware.threads_per_rank is None and ranks.environment(config).get("OMP_NUM_THREADS") == "1"
    ]
    if not of_one_thread:
        return []
    return [
        f"{len(of_one_thread)} of {len(configs)} configurations update their parameters on the host, where each rank "
        "has one thread; set hardware.threads_per_rank, to 8 for example"
    ]


def _doubt(config: TrialConfig) -> str | None:
    """A known fault of the method's library with this kernel, in words."""
    ask = getattr(methods.get(config.method.name), "doubt", None)
    return ask(config.kernel.name, hardware.package_versions()) if ask else None


def _needed_bytes(config: TrialConfig) -> float:
    """Bytes that a rank needs on its device: the estimated peak, or without an estimate what it surely holds."""
    if memory.unmodelled_reason(config) is None:
        return memory.peak(config).bytes
    return memory.held_bytes(config) / config.world_size


def _unknown_rates(trials: Sequence[Trial], found: hardware.Gpus | None) -> list[str]:
    """Names the GPUs here whose peak rate in a dtype of the trials no datasheet has."""
    dtypes = sorted({trial.config.dtype for trial in trials if trial.config.hardware.device == "cuda"})
    models = sorted({gpu.name for gpu in found.devices}) if found else []
    return [
        f"warning: no peak rate of {model} in {dtype} is known: mfu and hfu are null"
        for model, dtype in itertools.product(models, dtypes)
        if hardware.peak_flops(model, dtype) is None
    ]


def _of_packs(trials: Sequence[Trial]) -> list[str]:
    """Says what is in each pack of documents, and how unevenly methods cut its work over the ranks."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, None]] = {}
    for config in {trial.cell_id: trial.config for trial in trials if trial.unsupported_reason is None}.values():
        pack = derived.of_documents(config)
        if pack and config.sp_size > 1:
            of_seed = f" of seed {config.seed}" if config.workload.packing == "lognormal" else ""
            what = (
                f"pack{of_seed} of {config.seq_len:,} tokens: {pack['num_documents']} documents, "
                f"{pack['median_document']:,.0f} tokens in median, {pack['longest_document']:,} at most"
                f"{_left_out(config)}; attention of the busiest of {config.sp_size} ranks over the mean"
            )
            share = f"{config.method.name} {layout(config)} {pack['flops_imbalance']:.2f}"
            found.setdefault((what, config.documents(config.seq_len)), {})[share] = None
    return [f"{what}: {', '.join(shares)}" for (what, _), shares in found.items()]


def _left_out(config: TrialConfig) -> str:
    """Says how much of a list of documents lies beyond the end of the pack."""
    lens = config.workload.document_lens
    beyond = sum(from_text(lens)) - config.seq_len if lens is not None else 0
    return f" (the list has {beyond:,} tokens more, which are left out)" if beyond >= MULTIPLE else ""


def _measured_elsewhere(without_row: Sequence[Trial], campaign: Campaign) -> list[str]:
    """Explains why trials run again although the campaign has rows of them."""
    wanted = {trial.trial_id: campaign.env_id(trial) for trial in without_row}
    committed = store.committed(campaign.folder)  # another run may have added rows of this environment meanwhile
    found = {row.trial_id for row in committed if wanted.get(row.trial_id, row.env_id) != row.env_id}
    if not found:
        return []
    return [
        f"{counted(len(found), 'trial')} of {len(wanted):,} to run had been measured before, but with other "
        "libraries, on another device or with other code. Those rows stay; a report shows the newest of each cell"
    ]


def _device_time(
    left: Sequence[Trial], searches: Sequence[Searching], machine: Machine, settings: CampaignConfig
) -> list[str]:
    """Estimates how long the remaining trials and searches keep GPUs busy, and what that costs. Without GPUs here, as
    on a login node, it counts the trials that a machine with GPUs could run. `plan` asks the rows under results_root
    how long such trials took; a run does not wait for that."""
    cells = {trial.cell_id: trial.config for trial in left if trial.config.hardware.device == "cuda"}  # fewer
    refused = {cell_id: machine.refusal(config) for cell_id, config in cells.items()}
    runnable = [trial for trial in left if refused.get(trial.cell_id, "on a CPU") is None]
    asks = runnable and settings.plan_only
    known = device_time.measured(_rows(Path(settings.results_root))) if asks else {}
    times = (
        device_time.trial_time(
            trial.config, machine.device_name, relies=proven.is_likely(trial, settings.proof), first=first, known=known
        )
        for trial, first in zip(runnable, device_time.firsts(trial.config for trial in runnable), strict=True)
    )
    estimated = [(trial.config, time) for trial, time in zip(runnable, times, strict=True) if time is not None]
    listed = [time for _, time in estimated]
    searched = [(each.search.config, seconds) for each in searches if (seconds := each.left_s)]
    if not listed and not searched:
        return []
    counts = [counted(len(listed), "trial")] if listed else []
    counts += [f"{len(searched)} search{'es' * (len(searched) != 1)}"] if searched else []
    whole_s = sum(each.whole for each in listed)
    timed = f", {sum(each.timed for each in listed) / whole_s:.0%} of the trials' time in timed steps" if listed else ""
    every = [(config, time.whole) for config, time in estimated] + searched
    gpu_hours = sum(config.num_hosts * config.gpus_per_node * seconds for config, seconds in every) / 3600
    about = device_time.minutes(sum(seconds for _, seconds in every))
    hours = f"{number(gpu_hours)} {cost_text(gpu_hours, settings.price)}"
    return [f"devices: {' and '.join(counts)} on GPUs, about {about}{timed}; {hours}"]


def _rows(results: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of all campaigns that can be read: another's folder does not end a plan."""
    for folder in store.campaigns_of(results):
        with suppress(OSError):
            yield from store.read(folder, device_time.COLUMNS)[0].to_pylist()
