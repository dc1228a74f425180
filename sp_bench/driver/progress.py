"""Shows a run or a plan to a person: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from sp_bench.config.engine import EngineConfig
from sp_bench.config.options import as_overridden
from sp_bench.config.parsing import shown
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.flags import OF_DEVICES
from sp_bench.formats import counted
from sp_bench.rows.names import config_values, tell_apart

if TYPE_CHECKING:  # every command prints, but few of them plan
    from sp_bench.planning.plan import Trial
    from sp_bench.rows.row import Outcome

FAILURES = ("timeout", "incorrect", "error", "preempted")
STYLES = {"ok": "green", "unsupported": "yellow", "oom": "magenta", "to run": "cyan"}
REASON_WIDTH = 200  # characters of a trial's reason; its row has all of it
LONGEST = 2 * REASON_WIDTH  # of it, escapes spelt out
LINES_WIDTH = 240  # columns of a table that goes to a file or a pipe

Apart = Mapping[str, Sequence[tuple[str, Any]]]  # cell_id -> options that tell it apart, with its values


def console() -> Console:
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=LINES_WIDTH)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None: a file or a pipe, which get tables whatever their width."""
    terminal = Console()
    return terminal.width if terminal.is_terminal else None


@contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """A function that shows on stderr what is being done; it shows nothing if stderr is no terminal."""
    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        yield lambda words: None
        return
    with stderr.status("") as status:
        yield status.update


def counts_text(counts: Counter[str]) -> str:
    failed = sum(counts[status] for status in FAILURES)
    parts = [f"{counts['ok']} ok", f"{counts['unsupported']} unsupported", f"{counts['oom']} oom", f"{failed} failed"]
    return ", ".join(parts)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def label(trial: Trial, options: Apart) -> str:
    """One trial in a few words. options: from `apart`, of all trials that are shown together."""
    more = (_option_words(options[trial.cell_id]), f"replicate {trial.replicate}" if trial.replicate else "")
    return " ".join(filter(None, (_cell_label(trial.config), *more)))


def layout(config: TrialConfig) -> str:
    """The layout, and for a method on two axes its placement, which says which of them is the inner one."""
    method = config.method
    return f"{method.layout}/{method.placement}" if method.placement else method.layout


def workload(config: TrialConfig) -> str:
    """The workload, its pass and, unless it is the default one, the engine: train_step/step hf_deepspeed."""
    name = f"{config.workload.name}/{config.workload.pass_kind}"
    return name if config.engine.name == EngineConfig().name else f"{name} {config.engine.name}"


def apart(trials: Iterable[Trial]) -> Apart:
    """cell_id -> the options and values that distinguish the cell from others with the same label."""
    cells = {trial.cell_id: trial.config for trial in trials}
    return dict(zip(cells, _distinguishing([*cells.values()]), strict=True))


def _distinguishing(configs: Sequence[TrialConfig]) -> list[list[tuple[str, Any]]]:
    values = [config_values(config) for config in configs]
    paths = dict.fromkeys(path for each in values for path in each)
    return tell_apart([*map(_cell_label, configs)], values, [*paths])


def _option_words(options: Sequence[tuple[str, Any]]) -> str:
    """Options as a command line has them: workload.micro_batches=8."""
    return " ".join(f"{as_overridden(path)}={'null' if value is None else value}" for path, value in options)


def search_names(configs: Sequence[TrialConfig]) -> list[str]:
    """Names of searches: the labels of their trials, with seq_len=max."""
    return [
        " ".join(
            filter(None, (_cell_label(c).replace(f"seq_len={c.seq_len} ", "seq_len=max ", 1), _option_words(options)))
        )
        for c, options in zip(configs, _distinguishing(configs), strict=True)
    ]


def _cell_label(config: TrialConfig) -> str:
    if config.workload.name == "collective":
        return f"{config.method.name} collective {config.fabric.name} sp_size={config.sp_size} {config.dtype}"
    dp = config.dp_replicate_size * config.dp_shard_size
    words = [
        config.method.name,
        layout(config),
        config.kernel.name,
        workload(config),
        config.model.name,
        f"seq_len={config.seq_len}",
        f"sp_size={config.sp_size}",
        config.fabric.name,
        *([f"dp={dp}"] if dp > 1 else []),
        config.dtype,
    ]
    return " ".join(words)


class Progress:
    """Counts and shows the trials of one run as they end. before: the statuses of trials that were done before."""

    def __init__(self, left: Sequence[Trial], before: Sequence[str] = ()) -> None:
        self.planned, self.before = len(left) + len(before), Counter(before)
        self.counts: Counter[str] = Counter()
        self.elsewhere = 0  # how many of these other runs committed
        self.later = 0  # probes that searches after this one will take
        self._probing: str | None = None  # the search that runs and its bracket, in words
        self._probes, self._most_probes = 0, 0  # probes left in this search: an estimate, and its budget
        self._to_launch = sum(1 for trial in left if not trial.unsupported_reason)
        self._launched_s: list[float] = []
        self._current: Trial | None = None
        self._phase, self._since = "", 0.0
        self._noted: set[str] = set()
        self._options = dict(apart(left))
        self._console = console()
        self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        if self.before:
            self.note(f"{self.before.total()} of {self.planned} trials are committed already")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    @property
    def done(self) -> int:
        return self.before.total() + self.counts.total()

    @property
    def eta_s(self) -> float | None:
        """Seconds left, if the remaining trials take as long as those before; None before the first."""
        if not self._launched_s:
            return None
        mean = sum(self._launched_s) / len(self._launched_s)
        listed = self._to_launch - len(self._launched_s) if self._probing is None else 0
        return mean * (listed + self._probes + self.later)

    @property
    def left(self) -> str:
        """The trials or probes that are left and the time they take, in words."""
        eta = f", ETA {duration(self.eta_s)}" if self.eta_s is not None else ""
        if self._probing is None:
            later = f" and about {self.later} probes of searches" if self.later else ""
            return f"{self.planned - self.done} left{later}{eta}"
        return f"about {self._probes} of at most {self._most_probes} probes left{eta}"

    def probe(self, words: str, left: int, most: int) -> None:
        """The next trial is a probe of a search. words: the search and its bracket. left: estimated probes that remain,
        this one included. most: how many its budget allows."""
        self._probing, self._probes, self._most_probes = words, left, most
        self.note(f"{words}; {self.left}")

    def know(self, status: str) -> None:
        """Count one more trial, which had its row before the run."""
        self.planned += 1
        self.before[status] += 1

    def expect(self, trial: Trial) -> None:
        """Count one more trial to run, which was not planned when the run began."""
        self.planned += 1
        self._to_launch += not trial.unsupported_reason
        self._options |= {trial.cell_id: []}

    def start(self, trial: Trial) -> None:
        self._current, self._phase, self._since = trial, "init", time.monotonic()

    def enter_phase(self, phase: str) -> None:
        self._phase = phase

    def finish(self, trial: Trial, outcome: Outcome, logs: Path | None = None) -> None:
        """Show a trial whose row was committed. logs: the folder of its ranks, if a launch failed."""
        elapsed = None
        if trial is self._current:
            elapsed = time.monotonic() - self._since
            self._launched_s.append(elapsed)
            self._current = None
        status, median_ms = outcome.status, outcome.measured.get("median_step_ms")
        self._count(status)
        took = f" {duration(elapsed)}" if elapsed is not None else ""
        words = ""
        if status != "ok" and outcome.reason:
            words = f": {shown(shorten(outcome.reason, REASON_WIDTH, placeholder=' ...'), LONGEST)}"
        elif status == "ok" and median_ms is not None:
            words = f": {median_ms:,.3f} ms a step"
        elif status == "ok" and not trial.config.is_timed:
            words = ": it fits"
        if logs is not None:
            words += f"; trial {trial.trial_id}, logs: {logs}"
        self._print(f"{status}{took}: {self._label(trial)}{words}", STYLES.get(status, "red"))
        for flag, meaning in OF_DEVICES.items():
            if flag in (outcome.measured.get("flags") or ()):
                self.note(f"flag {flag}: {meaning}; every step waits for it")

    def finish_elsewhere(self, trial: Trial, status: str) -> None:
        """Show a trial whose row another run committed."""
        self._count(status)
        self.elsewhere += 1
        self._to_launch -= not trial.unsupported_reason
        self._print(f"{status} by another run: {self._label(trial)}", STYLES.get(status, "red"))

    def _count(self, status: str) -> None:
        self.counts[status] += 1
        if self._probing is not None:
            self._probes, self._most_probes = max(self._probes - 1, 0), max(self._most_probes - 1, 0)

    def refuse(self, trial: Trial) -> None:
        """Show that the row of the trial that ran was refused."""
        self._current = None
        self.note(
            "another run took this trial over while this one stood still, so its row is refused here: "
            f"{self._label(trial)}"
        )

    def _label(self, trial: Trial) -> str:
        return label(trial, self._options)

    def note(self, words: str) -> None:
        """Print a line, but only once a run."""
        if words in self._noted:
            return
        self._noted.add(words)
        if self._console.is_terminal:
            self._console.print(Text(words, "dim"))
        else:
            print(words, flush=True)

    def _print(self, words: str, style: str) -> None:
        line = f"[{self.done}/{self.planned}] {words}"
        if self._console.is_terminal:
            self._console.print(Text(line, style))
        else:
            print(f"{line} ({counts_text(self.counts)}, {self.left})", flush=True)

    def _panel(self) -> Group:
        lines = [Text(f"{self.done}/{self.planned} done: {counts_text(self.counts)}, {self.left}")]
        if self._probing is not None:
            lines.append(Text(self._probing, "dim"))
        if self._current:
            now = f"{self._phase} {duration(time.monotonic() - self._since)}: {self._label(self._current)}"
            lines.append(Text(now, "dim"))
        return Group(*lines, ProgressBar(total=self.planned, completed=self.done))  # last: it ends no line


def summary(folder: Path, progress: Progress, effort: str, *, interrupted: bool) -> str:
    """The line that a run ends with. effort: how much of the time was measurement, in words; may be empty."""
    ran = f"{counts_text(progress.counts)}; " if progress.counts else ""
    before = f"{_before(progress.before)}; " if progress.before else ""
    others = f"{progress.elsewhere} by other runs; " if progress.elsewhere else ""
    stop = f"interrupted, {progress.planned - progress.done} left; " if interrupted else ""
    spent = f"{effort}; " if effort else ""
    return f"{counted(progress.planned, 'trial')}: {ran}{others}{before}{stop}{spent}rows: {folder}"


def _before(statuses: Counter[str]) -> str:
    """31 committed before, of them 1 unsupported, 1 preempted."""
    kinds = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()) if status != "ok")
    return f"{statuses.total()} committed before{f', of them {kinds}' if kinds else ''}"


PLAN_HEADINGS = (
    "#",
    "method",
    "layout",
    "kernel",
    "workload",
    "fabric",
    "model",
    "dtype",
    "seq_len",
    "sp",
    "dp",
    "rep",
    "options",  # that distinguish trials with the same label
)
PLAN_NUMBERS = ("seq_len", "sp", "dp", "rep")  # to the right


def plan_as_json(trials: Sequence[Trial], statuses: Sequence[str | None], notes: Sequence[str]) -> dict[str, Any]:
    """The content of `show_plan`, for programs. `status` is null unless the trial is done."""
    planned = [
        {
            "trial_id": trial.trial_id,
            "cell_id": trial.cell_id,
            "replicate": trial.replicate,
            "order_index": trial.order_index,
            "status": status,
            "unsupported_reason": trial.unsupported_reason,
            "config": trial.config.to_mapping(),
        }
        for trial, status in zip(trials, statuses, strict=True)
    ]
    return {"trials": planned, "notes": list(notes)}


def show_plan(trials: Sequence[Trial], statuses: Sequence[str | None], notes: Sequence[str]) -> None:
    """Every trial in the order of the run: to run, done, or unsupported and why; then the notes and the counts.

    Without rich's table, which takes a minute for 20,000 trials.
    """
    output = console()
    states = [_state(trial, status) for trial, status in zip(trials, statuses, strict=True)]
    kinds = Counter(state.partition(":")[0] for state in states)
    paint = {kind: _painter(output, STYLES.get(kind, "dim")) for kind in kinds}
    options = apart(trials)
    rows = [_plan_cells(trial, options) for trial in trials]
    headings, rows, shared = _without_shared(PLAN_HEADINGS, rows)
    if shared:
        print(f"all trials: {shared}")
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    # a pipe gets the table whatever its width, for grep and sort
    too_wide = output.is_terminal and sum(widths) + 2 * len(widths) + len("unsupported") > output.width
    if rows and not too_wide:
        print(f"{_aligned(headings, headings, widths)}  state")
    for cells, state in zip(rows, states, strict=True):
        painted = paint[state.partition(":")[0]](state)
        if too_wide:
            number, *values = zip(headings, cells, strict=True)
            text = f"{number[1]} " + ", ".join(f"{heading} {value}" for heading, value in values if value)
            print(fill(text, output.width, subsequent_indent="    ", break_on_hyphens=False))
            print(f"    {painted}")
        else:
            print(f"{_aligned(headings, cells, widths)}  {painted}")
    for note in notes:
        print(note)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    planned = f"{len(trials)} trial{'s' * (len(trials) != 1)}: {counts}" if trials else "no trial has a listed length"
    print(f"{planned}; nothing was launched")


def _without_shared(
    headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[str], Sequence[Sequence[str]], str]:
    """(headings and rows without the columns that have one value in all of several rows, those columns in words)."""
    if len(rows) < 2:
        return headings, rows, ""
    columns = [set(column) for column in zip(*rows, strict=True)]
    kept = [index for index, values in enumerate(columns) if len(values) > 1]
    shared = [
        f"{heading} {next(iter(v))}" for heading, v in zip(headings, columns, strict=True) if len(v) == 1 and v != {""}
    ]
    return [headings[i] for i in kept], [[row[i] for i in kept] for row in rows], ", ".join(shared)


def _aligned(headings: Sequence[str], cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        cell.rjust(width) if heading in PLAN_NUMBERS else cell.ljust(width)
        for heading, cell, width in zip(headings, cells, widths, strict=True)
    )


def _plan_cells(trial: Trial, options: Apart) -> tuple[str, ...]:
    config = trial.config
    kernel, model, seq_len = config.kernel.name, config.model.name, str(config.seq_len)
    if config.workload.name == "collective":  # it has none of them
        kernel = model = seq_len = "-"
    return (
        *(str(trial.order_index), config.method.name, layout(config), kernel, workload(config)),
        *(config.fabric.name, model, config.dtype, seq_len, str(config.sp_size)),
        *(str(config.dp_replicate_size * config.dp_shard_size), str(trial.replicate)),
        _option_words(options[trial.cell_id]),
    )


def _painter(output: Console, style: str) -> Callable[[str], str]:
    """A function that puts text in a style, if the output has styles. The style is rendered once."""
    with output.capture() as captured:
        output.print(Text("x", style), end="")
    before, _, after = captured.get().partition("x")
    return lambda text: f"{before}{text}{after}"


def _state(trial: Trial, status: str | None) -> str:
    if status == "unsupported" and not trial.unsupported_reason:
        return "done: unsupported, by its own ranks, which would refuse the same code and options again"
    if status is not None:
        return f"done: {status}"
    return f"unsupported: {trial.unsupported_reason}" if trial.unsupported_reason else "to run"
