"""doctor, methods: what this machine and the methods can do."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sp_bench.cli.options import FAILURES, AsJson, exit_if_failed, named_campaigns
from sp_bench.cli.run import Reporter, serve
from sp_bench.config.parsing import ConfigError, shown


def doctor(
    context: typer.Context,
    curves: Annotated[bool, typer.Option("--curves", help="Measure latency and bandwidth of each fabric")] = False,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Measure each GPU and each pair; exit code 1 if one is slow")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has: devices, libraries, and which kernels and methods run here or why not.

    sp-bench doctor

    With --curves: measure how fast each fabric of this machine moves messages, for each primitive. This runs
    sweep=fabrics (over gloo without two GPUs) and takes the overrides of `run`. Each curve is a row in results/fabrics
    and is measured once:

        sp-bench doctor --curves

        sp-bench doctor --curves fabric=nvlink,shm sp_size=8 results_root=/data/results

    With --gpus: measure for about a minute how fast each GPU of this host multiplies matrices and computes attention,
    and how fast each pair and all together exchange messages. A GPU over 10% below what committed rows of its kind
    reach, or below the median here, is named, as is one with a lowered power limit or too hot; the exit code is then 1.
    It measures this host, or the hosts of a Slurm job or of torchrun together, and the links between them:

        sp-bench doctor --gpus

        sp-bench doctor --gpus num_nodes=2
    """
    from sp_bench.driver import campaign
    from sp_bench.look import doctor as examination
    from sp_bench.planning import overrides, sweep

    if gpus and curves:
        raise ConfigError("doctor takes --curves or --gpus, not both")
    if gpus:
        _measure_gpus(context.args, as_json=as_json)
        return
    if not curves:
        if context.args:
            words = shown(" ".join(context.args))
            raise ConfigError(f"{words}: doctor takes --curves or --gpus, and overrides only with these")
        if as_json:
            print(json.dumps(examination.examine(), indent=1))
        else:
            examination.show()
        return
    if as_json:
        raise ConfigError("--json shows what this machine has; curves are rows, which the report reads")
    overrides.use_config_dirs([])
    request = overrides.read_arguments(overrides.replaced(examination.fabrics_here(), context.args))
    configs, settings = sweep.configs(request)
    statuses = campaign.run(configs, settings, Reporter())
    examination.show_curves(settings.folder)
    exit_if_failed(statuses, FAILURES.split(","))


def _measure_gpus(arguments: list[str], *, as_json: bool) -> None:
    from sp_bench.driver import progress
    from sp_bench.look import health as examination
    from sp_bench.planning import allocation, overrides, sweep
    from sp_bench.predict import fitted

    own = [] if "hardware=cpu" in arguments else examination.here(_num_nodes(arguments))
    overrides.use_config_dirs([])
    configs, settings = sweep.configs(overrides.read_arguments(overrides.replaced(own, arguments)))
    if len(configs) != 1:
        raise ConfigError(f"--gpus takes one value of each option; these are {len(configs)} trials")
    if configs[0].num_hosts > 1 and (hosts := allocation.here()).node:
        raise typer.Exit(serve(settings.folder, hosts))
    with progress.working() as say:
        health = examination.measure(configs[0], settings.folder, say)
    expected = fitted.rates_of(configs[0])
    wrong = list(examination.complaints(health, expected))
    if as_json:
        found = health.as_json() | {"expected": asdict(expected), "wrong": wrong}
        print(json.dumps(found, indent=1))
    else:
        examination.show(health, expected, wrong)
    if wrong:
        raise typer.Exit(1)


def _num_nodes(arguments: Sequence[str]) -> int:
    given = [word.partition("=")[2] for word in arguments if word.startswith("num_nodes=")]
    return int(given[-1]) if given and given[-1].isdecimal() else 1


def methods(
    write: Annotated[Path | None, typer.Option(help="Write the table into this file, between its two markers")] = None,
    packed: Annotated[
        list[Path] | None,
        typer.Option(metavar="CAMPAIGN", help="Show who computes packed documents right, from these rows; repeatable"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which method can split which heads over how many ranks, or why it cannot.

    sp-bench methods

    Show which of them compute packed documents right, after `sp-bench run sweep=cpu_packed_gate`:

        sp-bench methods --packed results/cpu_packed_gate
    """
    from sp_bench.look import methods_table

    if packed:
        if as_json:
            raise ConfigError("--json is for the table of heads and ranks; sp_bench.load reads rows")
        from sp_bench import report as reports
        from sp_bench.report import packed_gate

        gates = []
        for campaign in named_campaigns(packed):
            of_campaign = packed_gate.gates(reports.read([campaign]))
            if not of_campaign:
                raise ConfigError(
                    f"{shown(campaign)} has no rows of packed documents; sp-bench run sweep=cpu_packed_gate"
                )
            gates += of_campaign
        text = packed_gate.markdown(gates)
        print(text, end="")
        if write:
            methods_table.write_between(write, packed_gate.BEGIN, packed_gate.END, text)
        return
    if as_json:
        print(json.dumps(methods_table.as_json(), indent=1))
    else:
        methods_table.show()
    if write:
        methods_table.write_into(write)
