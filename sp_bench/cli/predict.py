"""project, advise: predictions for training steps without measurements."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sp_bench.cli.options import AsJson, named_campaigns
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.driver.progress import working

Rows = Annotated[
    list[Path] | None, typer.Argument(help="Campaign folders; default: all in results/", show_default=False)
]

Kernel = Annotated[str, typer.Option(help="Whose rows say how fast attention is")]

Hardware = Annotated[str, typer.Option(help="Whose rows say how fast it is; speeds of others are not predicted")]

Node = Annotated[int, typer.Option(min=1, help="GPUs of a node")]

Network = Annotated[float, typer.Option(min=0.1, metavar="GIB/S", help="Of one GPU to other nodes; 45: 400 Gbit/s")]

MemoryGib = Annotated[
    float | None, typer.Option(min=1, metavar="GIB", help="Of one GPU; default: that of the hardware's rows")
]


def project(
    folders: Rows = None,
    model: Annotated[str, typer.Option(help="A file of conf/model")] = "qwen3_8b",
    gpus: Annotated[str, typer.Option(metavar="N,N", help="Numbers of GPUs, powers of two")] = "8,64,512,4096",
    seq_len: Annotated[str, typer.Option(metavar="N,N", help="Lengths in tokens")] = "131072,1048576",
    recompute: Annotated[str, typer.Option(help="What is recomputed: full, selective, ..., or any")] = "full",
    kernel: Kernel = "cudnn",
    hardware: Hardware = "h200",
    gpus_per_node: Node = 8,
    network: Network = 45.0,
    memory: MemoryGib = None,
    decisions: Annotated[bool, typer.Option("--map", help="The fastest attention by heads, ranks and network")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict training steps without measurements, and show how wrong such predictions were.

    sp-bench project --model qwen3_8b --gpus 8,64,512 --seq-len 131072,1048576

    A map of which method's attention is fastest:

        sp-bench project --map

    Rates are fitted to the rows of campaigns. Then rows are left out (the largest number of GPUs, the longest length,
    each slower fabric) and predicted; the errors are printed below each answer. Only options of measured training steps
    are offered, and each answer names the cells behind it. Exit codes: 0 predicted, 2 bad input or missing rows.
    """
    from sp_bench.predict import advice, projection

    known = advice.CHECKPOINTING
    if recompute != "any" and recompute not in known:
        raise ConfigError(f"--recompute {shown(recompute)}: use any, or one of {', '.join(known)}")
    fit = _fit(folders, hardware)
    try:
        found = []
        if decisions:
            print(advice.decision_map(fit, kernel, gpus_per_node))
            print(f"\nBold: ahead by more than {fit.band(False, 1):.0%}, the error to reckon with.")
            print(f"\n{advice.evidence_of_map(fit, kernel)}")
        else:
            for number in _numbers("--gpus", gpus):
                cluster = advice.Cluster(number, gpus_per_node, network, _memory_gib(fit, memory))
                for config in _steps(model, hardware, kernel, fit.fabric, seq_len):
                    kept = known if recompute == "any" else (recompute,)
                    try:
                        found += advice.best_of_each_method(advice.candidates(fit, config, cluster, kept))
                    except advice.NothingFits as error:
                        print(f"sp-bench: {error}", file=sys.stderr)
            if as_json:
                print(json.dumps([each.as_json() for each in found], indent=1))
                return
            print(advice.table(found))
    except projection.NotProjectable as error:
        raise ConfigError(str(error)) from None
    if found:
        print(f"\n{advice.evidence(found)}")
    print(f"\n{advice.errors(fit)}\n\n{advice.ASSUMPTIONS}")


def advise(
    model: Annotated[str, typer.Option(help="A file of conf/model")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs, a power of two")],
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a sequence")],
    folders: Rows = None,
    kernel: Kernel = "cudnn",
    hardware: Hardware = "h200",
    gpus_per_node: Node = 8,
    network: Network = 45.0,
    memory: MemoryGib = None,
    as_json: AsJson = False,
) -> None:
    """Advise in five lines how to train a model: method, memory, step time, runner-up, how to measure it.

    sp-bench advise --model qwen3_8b --gpus 16 --seq-len 262144

    Speeds are those of the rows of --hardware, whatever --memory a GPU has. `project` explains the prediction and its
    errors. Exit codes: 0 answered, 2 bad input, missing rows or nothing that fits.
    """
    from sp_bench.predict import advice, projection

    _numbers("--gpus", str(gpus))
    fit = _fit(folders, hardware)
    cluster = advice.Cluster(gpus, gpus_per_node, network, _memory_gib(fit, memory))
    try:
        (config,) = _steps(model, hardware, kernel, fit.fabric, str(seq_len))
        found = advice.candidates(fit, config, cluster)
    except projection.NotProjectable as error:
        raise ConfigError(str(error)) from None
    if as_json:
        print(json.dumps([each.as_json() for each in advice.best_and_others(found)], indent=1))
    else:
        print("\n".join(advice.advice(found, cluster)))


def _fit(folders: Sequence[Path] | None, hardware: str) -> Any:
    """The rates fitted to the rows of campaigns."""
    from sp_bench import report as reports
    from sp_bench.look import show as showing
    from sp_bench.predict import projection

    campaigns = named_campaigns(folders) if folders else showing.campaigns_of(Path("results"))
    try:
        with working() as say, reports.processes(campaigns) as executor:
            say("reading rows")
            return projection.fit(reports.read(campaigns, executor), hardware)
    except projection.NotProjectable as error:
        raise ConfigError(str(error)) from None


def _steps(model: str, hardware: str, kernel: str, fabric: str, seq_len: str) -> Sequence[Any]:
    """One config of a training step for each length, composed as a command line would."""
    from sp_bench.driver import overrides, sweep

    words = [f"model={model}", f"hardware={hardware}", f"kernel={kernel}", f"fabric={fabric}", f"seq_len={seq_len}"]
    words += ["workload=train_step", "workload.loss_tile_tokens=2048", "method=ulysses", "sp_size=2", "dtype=bfloat16"]
    configs, _ = sweep.configs(overrides.read_arguments(words))
    return configs


def _memory_gib(fit: Any, given: float | None) -> float:
    if (found := given or fit.memory_gib) is None:
        raise ConfigError("the rows do not say how much memory a device has; give --memory")
    return found


def _numbers(option: str, given: str) -> list[int]:
    """The numbers in `8,64`. They must be powers of two, since sequence ranks are found by halving all GPUs."""
    found = [int(word) if word.isdecimal() and len(word) < 8 else 0 for word in given.split(",")]
    if wrong := [word for word, n in zip(given.split(","), found, strict=True) if n < 1 or n & (n - 1)]:
        raise ConfigError(f"{option} {shown(wrong[0]) or 'an empty number'}: use powers of two, such as 8,64,512")
    return found
