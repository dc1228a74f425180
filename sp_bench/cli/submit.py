"""submit: a sweep as jobs of Slurm."""

from typing import Annotated

import typer

from sp_bench.cli.options import FAILURES, ConfigDir, FailOn, exit_if_failed, listed_statuses
from sp_bench.config.parsing import ConfigError


def submit(
    context: typer.Context,
    cluster: Annotated[str, typer.Option(metavar="NAME", help="A file of conf/cluster, such as slurm")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch scripts and submit nothing")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return once the jobs have ended")] = False,
    fail_on: FailOn = FAILURES,
    config_dir: ConfigDir = None,
) -> None:
    """Submit a sweep to Slurm: jobs that run what has no row yet, and retry what `resume` retries.

    Show the batch scripts, and submit nothing:

        sp-bench submit sweep=smoke --cluster slurm --dry-run

    Submit, with the words of a run, and come back when all jobs have ended:

        sp-bench submit method=ulysses,ring sp_size=8 hardware=h200 fabric=nvlink --cluster mine --wait

    The trials of a replicate with equal numbers of nodes and GPUs are one job, so that methods are compared on the same
    nodes; num_nodes=2 has trials over two. Each job is a `resume` on its first node. The same command later submits
    only trials without a row that are in no waiting or running job. conf/cluster/slurm.yaml explains the fields of a
    cluster. Exit codes: 0 submitted, 2 bad input or refused by Slurm; with --wait those of run, and 1 if trials have no
    row.
    """
    from sp_bench.cluster import file as clusters
    from sp_bench.cluster import submission
    from sp_bench.driver.progress import counts_text
    from sp_bench.formats import counted
    from sp_bench.planning import overrides, sweep

    failures = listed_statuses("--fail-on", fail_on)
    overrides.use_config_dirs(config_dir or [])
    request = overrides.read_arguments([*context.args, "resume=true"])
    if request.show_config:
        raise ConfigError("--cfg job shows one configuration; `sp-bench run` takes it")
    target = clusters.read(cluster)
    configs, settings = sweep.configs(request)
    words = [*context.args, "--fail-on", fail_on]
    words += [word for folder in config_dir or [] for word in ("--config-dir", str(folder))]
    job_ids = submission.submit(configs, settings, target, words, dry_run=dry_run)
    if wait and not dry_run:
        submission.wait(job_ids, configs, settings, target)
        ended = submission.statuses(configs, settings, target)
        print(f"{counted(ended.total(), 'trial')}: {counts_text(ended)}; rows: {settings.folder}")
        exit_if_failed(ended, failures)
