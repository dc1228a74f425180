"""A campaign of two-rank trials that faults are injected into, and what must not be left of them."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from expected import Cell

from sp_bench import handover
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import attempt, devices
from sp_bench.driver.attempt import Attempt, Campaign, Driver
from sp_bench.driver.claims import FOLDER, Claims
from sp_bench.driver.progress import Progress
from sp_bench.driver.signals import Signals
from sp_bench.planning import identity, plan
from sp_bench.planning.settings import CampaignConfig, DeadlinesConfig
from sp_bench.rows import store
from sp_bench.testing import faults

MARK = "SP_BENCH_TEST"  # in the environment of every process that a stage starts
DEADLINES = DeadlinesConfig(init=120, correctness=60, warmup=60, measure=60)
# What a hang waits for: long enough for both ranks to begin on a loaded machine, where init is timed from the launch.
HANG = {"init": 30.0, "correctness": 4.0, "warmup": 4.0, "measure": 4.0, "handover": 30.0}
SHORT = {"workload__correctness_seq_len": 48, "workload__warmup_steps": 1, "workload__timed_steps": 2}
OF_A_TRIAL = re.compile(
    r"trial\.json|record\.json|proof\.json|[0-9a-f]{12}-[0-9a-f]{8}-[0-9a-f]{8}\.json|rank\d\.(log|events\.jsonl)"
)


class Watched(Progress):
    """Tells of each phase that the driver sees."""

    def __init__(self, left: Sequence[plan.Trial], see: Callable[[str], None]) -> None:
        super().__init__(left)
        self._see = see

    def enter_phase(self, phase: str) -> None:
        super().enter_phase(phase)
        self._see(phase)


@dataclass
class Stage:
    """`trial` makes configs; nothing outlives a `launch`."""

    folder: Path
    make_config: Callable[..., TrialConfig]
    sessions: set[int] = field(default_factory=set)  # of all processes seen
    phase: str = ""

    def two_ranks(self, seed: int = 0, **changes: Any) -> TrialConfig:
        return self._config(method="ulysses", sp_size=2, seed=seed, **changes)

    def one_rank(self, seed: int = 0) -> TrialConfig:
        return self._config(method="single", sp_size=1, seed=seed)

    def _config(self, **changes: Any) -> TrialConfig:
        return self.make_config(kernel="math", seq_len=96, **{**SHORT, **changes}, workload__attribution=False)

    def launch(self, *configs: TrialConfig, deadlines: DeadlinesConfig = DEADLINES) -> list[dict[str, Any]]:
        """The rows of these trials, in order, of one launch: several may share their processes."""
        settings = CampaignConfig(
            campaign="faults",
            results_root=str(self.folder),
            replicates=1,
            order_seed=0,
            deadlines=deadlines,
            resume=False,
            max_attempts=1,
            plan_only=False,
            max_points=10,
        )
        campaign = Campaign(settings, self.folder / "faults", None, None)
        campaign.work.mkdir(parents=True, exist_ok=True)
        trials = [plan.plan([config], 1, 0, None)[0] for config in configs]
        with Claims(campaign.work / FOLDER) as claims, Signals() as signals:
            progress = Watched(trials, self._see_phase)
            driver = Driver(campaign, claims, signals, progress, ("cpu",))
            attempt.run_next([Attempt(trial, identity.env_id(trial.config), 0) for trial in trials], driver)
        table, problems = store.read(campaign.folder)
        assert problems == []
        rows = {row["trial_id"]: row for row in table.to_pylist()}
        return [rows[trial.trial_id] for trial in trials if trial.trial_id in rows]

    def strike(self, cell: Cell, seed: int = 0) -> tuple[dict[str, Any], float]:
        """The row of a trial with this fault, and the deadline in seconds that its phase had."""
        deadlines = DEADLINES
        if cell.kind == "hang":
            name = "init" if cell.phase == "handover" else cell.phase
            deadlines = replace(DEADLINES, **{name: HANG[cell.phase]})
        with fault(cell.variable):
            [row] = self.launch(self.two_ranks(seed), deadlines=deadlines)
        return row, vars(deadlines)["init" if cell.phase == "handover" else cell.phase]

    def trial_folder(self, row: dict[str, Any]) -> Path:
        (found,) = (self.folder / "faults" / store.WORK / "trials").glob(f"{row['trial_id']}-*")
        return found

    def _see_phase(self, phase: str) -> None:
        if phase != self.phase:  # looking at every process takes a while
            self.phase = phase
            self.sessions |= {session(process) for process in self._marked()} - {None}

    def _marked(self) -> list[psutil.Process]:
        marked = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    marked.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return marked

    def _of_a_session(self, process: psutil.Process) -> bool:
        return session(process) in self.sessions

    def left(self) -> list[str]:
        """Processes, locks, claims and temporary files that outlive the trials; empty when all is well."""
        alive = [f"process {process.pid}" for process in self._marked()]
        alive += [f"process {p.pid} of a trial's session" for p in psutil.process_iter() if self._of_a_session(p)]
        campaign = self.folder / "faults"
        files = [path for path in campaign.rglob("*") if path.is_file() and path.suffix != ".parquet"]
        litter = [path for path in files if not OF_A_TRIAL.fullmatch(path.name)]
        litter += list(campaign.rglob("claims/*"))
        litter += list((self.folder / "tmp").iterdir())
        alive += ["the lock of the processors"] * is_locked("cpu")
        self.sessions.clear()  # the system gives their numbers to other programs' sessions later
        return alive + [str(path.relative_to(self.folder)) for path in litter]


def session(process: psutil.Process) -> int | None:
    """Of a process that runs."""
    try:
        return os.getsid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


class Locked(Exception):
    pass


def is_locked(device: str) -> bool:
    def give_up() -> None:
        raise Locked

    try:
        with devices.reserved([device], give_up, lambda words: None):
            return False
    except Locked:
        return True


@contextmanager
def staged(folder: Path, make_config: Callable[..., TrialConfig]) -> Iterator[Stage]:
    """A stage whose processes are marked, and whose temporary files have a folder of their own."""
    (folder / "tmp").mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(folder / "tmp")
    try:
        with variables(**{MARK: str(folder), "TMPDIR": str(folder / "tmp")}):
            yield Stage(folder, make_config)
    finally:
        tempfile.tempdir = before


def fault(variable: str) -> Any:
    return variables(**{faults.VARIABLE: variable})


@contextmanager
def variables(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def struck_at(folder: Path, cell: Cell) -> float:
    """When the first struck rank entered its phase; seconds since the epoch."""
    ranks = (0, 1) if cell.ranks == "all" else (int(cell.ranks),)
    return min(e.at for e in handover.read_events(folder) if e.name == cell.phase and e.rank in ranks)


def ended_at(row: dict[str, Any]) -> float:
    return row["started_at"].timestamp() + row["duration_s"]
