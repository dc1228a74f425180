"""project, advise: predictions for training steps without measurements."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sp_bench.cli.options import AsJson, ConfigDir, Price, given_options, named_campaigns, require_together
from sp_bench.config.parsing import ConfigError, parse, shown
from sp_bench.driver.progress import terminal_width, working

Rows = Annotated[
    list[Path] | None,
    typer.Argument(help="Campaign folders; default: what the committed rows of this version say", show_default=False),
]

Kernel = Annotated[
    str | None, typer.Option(help="Whose rows say how fast attention is; default: the fastest that rows have")
]

Hardware = Annotated[str, typer.Option(help="GPU whose rows say how fast it is; speeds of others are not predicted")]

Node = Annotated[int, typer.Option(min=1, help="GPUs of a node")]

Network = Annotated[float, typer.Option(min=0.1, metavar="GIB/S", help="Of one GPU to other nodes; 45: 400 Gbit/s")]

MemoryGib = Annotated[
    float | None,
    typer.Option(min=1, metavar="GIB", help="Of one GPU, 79.2 of an H100; default: that of the hardware's rows"),
]

SAME_MEMORY = 0.02  # GPUs are those of the rows if they have as much memory within this share: 139.8 GiB, or 141
_TAKES = {"--map": frozenset({"--kernel", "--hardware", "--gpus-per-node"})}  # what it reads, beside campaigns


def project(
    context: typer.Context,
    folders: Rows = None,
    model: Annotated[str, typer.Option(help="A file of conf/model")] = "qwen3_8b",
    gpus: Annotated[str, typer.Option(metavar="N,N", help="Numbers of GPUs, powers of two")] = "8,64,512,4096",
    seq_len: Annotated[str, typer.Option(metavar="N,N", help="Lengths in tokens")] = "131072,1048576",
    recompute: Annotated[str, typer.Option(help="What is recomputed: any, full, selective, ...")] = "any",
    kernel: Kernel = None,
    hardware: Hardware = "h200",
    gpus_per_node: Node = 8,
    network: Network = 45.0,
    memory: MemoryGib = None,
    config_dir: ConfigDir = None,
    decisions: Annotated[bool, typer.Option("--map", help="The fastest attention by heads, ranks and network")] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTHS,LENGTHS",
            help="Batches of documents under static and dynamic groups of GPUs: wikipedia, books, fixed:TOKENS, "
            "lognormal:MEDIAN:SIGMA, or @FILE",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict training steps without measurements, and show how wrong such predictions were.

    sp-bench project --model qwen3_8b --gpus 8,64,512 --seq-len 131072,1048576

    A map of which method's attention is fastest:

        sp-bench project --map

    What groups of GPUs that follow each document's length would gain:

        sp-bench project --lengths wikipedia,books --model qwen3_8b --gpus 8 --seq-len 131072

    Rates are fitted to the rows of campaigns. Then rows are left out (the largest number of GPUs, the longest length,
    each slower fabric) and predicted; the errors are printed below each answer. Only options of measured training steps
    are offered, and each answer names the cells behind it. Where rows of one real rank have such a step, they stand
    before the fit's. Exit codes: 0 predicted, 2 bad input or missing rows.
    """
    from sp_bench.predict import candidates, projection

    require_together(given_options(context), _TAKES)
    known = candidates.CHECKPOINTING
    if recompute != "any" and recompute not in known:
        raise ConfigError(f"--recompute {shown(recompute)}: use any, or one of {', '.join(known)}")
    kept = known if recompute == "any" else (recompute,)
    fitted = _fitted(folders, hardware)
    fit = fitted.fits[hardware]
    attention = kernel or fit.fastest_kernel
    try:
        if decisions:
            print(_map(fit, attention, gpus_per_node))
            return
        asked = [
            (candidates.Cluster(number, gpus_per_node, network, *_memory(fit, memory)), config)
            for number in _numbers("--gpus", gpus)
            for config in _steps(model, hardware, attention, fit.fabric, seq_len, config_dir)
        ]
        if lengths is None:
            print(_ways(fitted, fit, asked, kept, as_json))
        else:
            print(_batches(fit, asked, lengths, kept, as_json))
    except projection.NotProjectable as error:
        raise ConfigError(str(error)) from None


def _map(fit: Any, kernel: str, gpus_per_node: int) -> str:
    from sp_bench.predict import advice, decision_map

    return "\n\n".join([
        decision_map.decision_map(fit, kernel, gpus_per_node),
        decision_map.evidence_of_map(fit, kernel),
        advice.errors(fit, terminal_width()),
        advice.ASSUMPTIONS,
    ])  # fmt: skip


def _batches(fit: Any, asked: Sequence[tuple[Any, Any]], lengths: str, kept: Sequence[str], as_json: bool) -> str:
    """Batches of documents under each policy. asked: cluster, and the step of its longest document."""
    from sp_bench.predict import advice, streams

    found = [
        policy
        for cluster, config in asked
        for each in lengths.split(",")
        for policy in streams.policies(fit, config, cluster, each, kept)
    ]
    if as_json:
        return json.dumps([*map(streams.as_json, found)], indent=1)
    width = terminal_width()
    return "\n\n".join([streams.table(found, width), advice.errors(fit, width), streams.ASSUMPTIONS])


def _ways(fitted: Any, fit: Any, asked: Sequence[tuple[Any, Any]], kept: Sequence[str], as_json: bool) -> str:
    """Each method's best way to take each step. asked: cluster and step. Steps that fit nowhere are named on stderr."""
    from sp_bench.predict import advice, candidates

    found = []
    for cluster, config in asked:
        try:
            ways = candidates.candidates(fit, config, cluster, kept)
        except candidates.NothingFits as error:
            print(f"sp-bench: {error}", file=sys.stderr)
            continue
        found += candidates.as_one_rank(ways, fitted.one_rank, fitted.one_rank_errors, cluster)
        found += candidates.best_of_each_method(ways)
    if as_json:
        return json.dumps([each.as_json() for each in found], indent=1)
    width = terminal_width()
    evidence = [advice.evidence(found, width)] if found else []
    return "\n\n".join([advice.table(found, width), *evidence, advice.errors(fit, width), advice.ASSUMPTIONS])


def advise(
    model: Annotated[str, typer.Option(help="A file of conf/model")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs, a power of two")],
    seq_len: Annotated[str, typer.Option(metavar="N", help="Tokens of a sequence")],
    folders: Rows = None,
    kernel: Kernel = None,
    hardware: Hardware = "h200",
    gpus_per_node: Node = 8,
    network: Network = 45.0,
    memory: MemoryGib = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="First run the methods as one real rank, on this machine's GPU")
    ] = False,
    price: Price = None,
    config_dir: ConfigDir = None,
    as_json: AsJson = False,
) -> None:
    """Say how to train a model on so many GPUs: method, memory, step time, and what the other methods would take.

    sp-bench advise --model qwen3_8b --gpus 16 --seq-len 262144

    Where rows of one real rank have such a step, they say it, unless the rates that were fitted to measured rows have a
    faster way; elsewhere those rates. Times within the error of each other are not told apart. What needs host memory
    is used where nothing else fits. On a machine with a GPU:

        sp-bench advise --model qwen3_8b --gpus 64 --seq-len 1048576 --measure

    Speeds are those of the rows of --hardware, whatever --memory a GPU has.
    `project` says how it is predicted, and how wrong that can be. Exit codes: 0 answered, 2 bad input, nothing that
    fits, or rows that are missing.
    """
    from sp_bench.predict import advice, candidates, projection
    from sp_bench.predict.fitted import one_rank_steps

    _numbers("--gpus", str(gpus))
    fitted = _fitted(folders, hardware)
    fit = fitted.fits[hardware]
    cluster = candidates.Cluster(gpus, gpus_per_node, network, *_memory(fit, memory))
    errors, steps = fitted.one_rank_errors, fitted.one_rank
    try:
        attention = kernel or fit.fastest_kernel
        config, *others = _steps(model, hardware, attention, fit.fabric, seq_len, config_dir)
        if others:
            raise ConfigError(f"--seq-len {shown(seq_len)}: give one length; `sp-bench project` takes several")
        found = candidates.candidates(fit, config, cluster)
        if measure:
            if not errors:
                raise ConfigError("--measure: these campaigns do not say how wrong one rank is; leave them out")
            runs = candidates.to_measure(found, cluster, candidates.link_of(cluster, _links()))
            steps = one_rank_steps(_measured_as_one_rank(runs))
    except projection.NotProjectable as reason:
        raise ConfigError(str(reason)) from None
    ones = candidates.as_one_rank(found, steps, errors, cluster)
    if measure and not ones:
        why = "fewer than two methods that ran fit in its memory and can be compared"
        print(f"sp-bench: --measure: {why}; by the fit:", file=sys.stderr)
    if as_json:
        fits = candidates.best_and_others(found)
        ways = [*ones, *fits] if candidates.recommended(found, ones).one_rank else [*fits, *ones]
        print(json.dumps([each.as_json(price) for each in ways], indent=1))
    else:
        print("\n".join(advice.advice(found, cluster, ones, price, _missing(config))))


def _measured_as_one_rank(runs: Sequence[Sequence[str]]) -> Any:
    """The cells of runs of one real rank.

    Raises:
        ConfigError: a step cannot run here; the message has the row's reason.
    """
    from sp_bench import api
    from sp_bench import report as reports

    for words in runs:
        rows = api.run(*words, f"campaign={MEASURED}")
        failed = rows[rows["status"] != "ok"]
        for status, reason in zip(failed["status"], failed["reason"], strict=True):
            raise ConfigError(f"--measure: {' '.join(words)}: {status}: {reason}")
    return reports.read([Path("results") / MEASURED])


def _links() -> list[Any]:
    """The files of conf/link, ours and the user's."""
    from sp_bench.config.machine import LinkConfig
    from sp_bench.planning import overrides

    return [parse(LinkConfig, overrides.conf_file(f"link/{name}")) for name in overrides.choices("link")]


MEASURED = "advised"  # campaign of what `advise --measure` ran


def _fitted(folders: Sequence[Path] | None, hardware: str) -> Any:
    """What the rows of campaigns say, or those that this version was released with.

    Raises:
        ConfigError: they cannot say how fast `hardware` is.
    """
    from sp_bench import report as reports
    from sp_bench.cli.processes import processes
    from sp_bench.predict import fitted, projection

    if not folders:
        found = fitted.load()
        if hardware not in found.fits:
            raise ConfigError(
                f"speeds of hardware={hardware} cannot be predicted: the committed rows have too few of it; "
                f"{projection.instead(hardware, sorted(found.fits))}; or name campaigns"
            )
        return found
    campaigns = named_campaigns(folders)
    try:
        with working() as say, processes(campaigns) as executor:
            say("reading rows")
            return fitted.of_cells(reports.read(campaigns, executor), "", [hardware])
    except projection.NotProjectable as error:
        raise ConfigError(str(error)) from None


def _steps(
    model: str, hardware: str, kernel: str, fabric: str, seq_len: str, config_dirs: Sequence[Path] | None
) -> Sequence[Any]:
    """One config of a training step for each length, composed as a command line would."""
    from sp_bench.planning import overrides, sweep

    overrides.use_config_dirs(config_dirs or [])
    words = [f"model={model}", f"hardware={hardware}", f"kernel={kernel}", f"fabric={fabric}", f"seq_len={seq_len}"]
    words += ["workload=train_step", "workload.loss_tile_tokens=2048", "method=ulysses", "sp_size=2", "dtype=bfloat16"]
    configs, _ = sweep.configs(overrides.read_arguments(words))
    return configs


def _missing(config: Any) -> str:
    """Why this machine cannot run the kernel, such as a package that it lacks; empty if it can."""
    from sp_bench import kernels

    shape = config.attention_shape(config.seq_len)
    return kernels.get(config.kernel.name).unsupported_reason(shape, config.hardware.device) or ""


def _memory(fit: Any, given: float | None) -> tuple[float, str | None]:
    """GiB of one GPU; and `hardware=` of the command that measures it, if that is other memory than the rows' GPUs
    have. None: it is theirs."""
    from sp_bench.planning.overrides import THIS_DEVICE

    of_rows = fit.memory_gib
    if (found := given or of_rows) is None:
        raise ConfigError("the rows do not say how much memory a device has; give --memory")
    is_other = of_rows is not None and abs(found / of_rows - 1) > SAME_MEMORY
    return found, THIS_DEVICE if is_other else None


def _numbers(option: str, given: str) -> list[int]:
    """The numbers in `8,64`. They must be powers of two, since sequence ranks are found by halving all GPUs."""
    found = [int(word) if word.isdecimal() and len(word) < 8 else 0 for word in given.split(",")]
    if wrong := [word for word, n in zip(given.split(","), found, strict=True) if n < 1 or n & (n - 1)]:
        raise ConfigError(f"{option} {shown(wrong[0]) or 'an empty number'}: use powers of two, such as 8,64,512")
    return found
