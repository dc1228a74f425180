"""Real driver processes with cheap stand-ins for their trials: `python drivers.py <spec> ...`.

A spec is JSON, and of one campaign: `configs`, the trials, each of one rank; `folder`, where all happens; `stages`,
which run one after another, each a list of drivers that run at once. Of a driver, all optional: `behaviour` of its
trials, `resume`, `env_id`, `fail_point`, `errno` of its disk, `second`: it begins when a trial has been launched, as if
elsewhere. Prints a line for each spec, the exit codes of each stage's drivers. One process imports everything once and
forks the drivers.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 - pyarrow imports it at the first row: once, here, and not in each driver
from records import record_of

from sp_bench.config import parsing
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import campaign, claims, devices, launch
from sp_bench.planning import identity
from sp_bench.planning.settings import CampaignConfig, DeadlinesConfig
from sp_bench.rows import git
from sp_bench.testing import kill_points

OK = """
for folder in "$@"; do
    basename "$folder" >> "$LAUNCHES"
    printf '{"rank": 0, "at": 1.0, "name": "done"}\\n' > "$folder/rank0.events.jsonl"
    printf %s "$RECORD" > "$folder/record.json"
done
"""
TRIALS = {
    "ok": OK,
    "slow": OK.replace("printf", "sleep 3\n    printf", 1),
    "exit": 'basename "$1" >> "$LAUNCHES"; echo no luck; exit 7',
    "hang": 'basename "$1" >> "$LAUNCHES"; sleep 600',
    "delete": OK + 'rm -r "$CAMPAIGN"',
}


class NoReport:
    """Stands in for the report, which takes seconds."""

    def effort(self, folder: Path) -> str:
        return ""

    def build(self, folder: Path) -> list[str]:
        return []


def main(spec: dict[str, Any]) -> None:
    launch.POLL_S = 0.02
    claims.STALE_S = 5.0
    git.state = lambda: (None, None)
    configs = [parsing.parse(TrialConfig, mapping) for mapping in spec["configs"]]
    for config in configs:
        identity.env_id(config)  # reads every source: once, here, and not in each driver
    codes = []
    for stage, drivers in enumerate(spec["stages"]):
        pids = [_fork(configs, Path(spec["folder"]), f"{stage}-{n}", driver) for n, driver in enumerate(drivers)]
        codes.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
    print(json.dumps(codes), flush=True)


def _fork(configs: list[TrialConfig], folder: Path, name: str, driver: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    output = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["LAUNCHES"] = str(folder / "launches.txt")
    os.environ["RECORD"] = json.dumps(record_of(configs[0]))  # one rank sends nothing, so it fits all of them
    os.environ["CAMPAIGN"] = str(folder / "results" / "c")
    if driver.get("second"):
        while not (folder / "launches.txt").exists():
            time.sleep(0.05)
        os.environ[devices.SCOPE] = name
    if driver.get("fail_point"):
        os.environ[kill_points.VARIABLE] = driver["fail_point"]
    script = TRIALS[driver.get("behaviour", "ok")]
    launch.worker = lambda folders: ["sh", "-c", script, "sh", *map(str, folders)]
    if number := driver.get("errno"):
        os.replace = _refuse_row(number, os.replace)
    if env_id := driver.get("env_id"):
        identity.env_id = lambda config: env_id
    settings = CampaignConfig(
        campaign="c",
        results_root=str(folder / "results"),
        replicates=1,
        order_seed=0,
        deadlines=DeadlinesConfig(60, 60, 60, 60),
        resume=driver.get("resume", False),
        max_attempts=3,
        plan_only=False,
        max_points=100,
    )
    code = 1
    try:
        campaign.run(configs, settings, NoReport())
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except parsing.ConfigError as error:
        print(f"sp-bench: {error}", flush=True)
        code = 2
    finally:
        sys.stdout.flush()
        os._exit(code)


def _refuse_row(number: int, replace: Callable[..., None]) -> Callable[..., None]:
    """As a disk that gives out: the second row, the first that a trial has run for, cannot be written."""

    def refuse(source: Any, target: Any) -> None:
        if str(target).endswith("-ok.parquet"):
            raise OSError(number, os.strerror(number), str(source))
        replace(source, target)

    return refuse


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(json.loads(argument))
