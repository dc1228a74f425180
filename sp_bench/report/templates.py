"""Documents over rows: `NAME.md.jinja` becomes `NAME.md`. A number in it comes from rows by a helper, and `require`
holds what a sentence says beside its numbers. Equal rows give equal text.

    {{ pair("h200x2_headline", "ulysses", "ring", kernel="flash_attn_4") }}   ->   1.005x [1.000, 1.006]
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from sp_bench import formats
from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell, cells, of_equal_steps
from sp_bench.analysis.fabric_model import bandwidths
from sp_bench.analysis.grades import code_changes
from sp_bench.analysis.grid import grid
from sp_bench.analysis.held import errors, held, largest_error
from sp_bench.analysis.limits import limits
from sp_bench.analysis.metrics import memory_gib
from sp_bench.analysis.over_depth import at_full_depth
from sp_bench.analysis.ratios import times
from sp_bench.analysis.selection import select
from sp_bench.analysis.settings import APART, Difference, Setting, settings
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import OF_METHODS
from sp_bench.formats import GIB, MISSING, counted, whole
from sp_bench.report import answers, campaigns, held_tables, setup_table
from sp_bench.report.findings import findings
from sp_bench.report.published import beside_one_rank

SUFFIX = ".jinja"


More = Mapping[str, Callable[..., Any]]  # further helpers, which get all cells as their first argument


def render(
    templates: Sequence[Path], folders: Sequence[Path], executor: Executor | None = None, more: More | None = None
) -> list[Path]:
    """Write each document beside its template. A folder stands for the templates in it.

    Raises:
        ConfigError: no such template, or one that cannot be rendered: the message has file, line and reason.
        OSError: a campaign cannot be read, or a document cannot be written.
    """
    rows = Rows(folders, executor, more)
    written = []
    for template in _found(templates):
        target = template.with_suffix("")
        target.write_text(rendered(template, rows), "utf-8")
        written.append(target)
    return written


def rendered(template: Path, rows: "Rows") -> str:
    """The text of one document.

    Raises:
        ConfigError: as `render`.
    """
    environment = SandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.globals |= rows.helpers
    try:
        return environment.from_string(template.read_text("utf-8")).render()
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{shown(template)}, line {error.lineno}: {shown(error, 1000)}") from None
    except (jinja2.TemplateError, _Refused, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{shown(template)}, line {_line(error)}: {shown(error, 1000)}") from None


class _Refused(Exception):
    """What a helper cannot give, or what `require` holds is no longer so."""


@dataclass(frozen=True)
class Bracket:
    """The longest sequence that fits, and the shortest that does not, in tokens."""

    fits: int
    fails: int

    def __str__(self) -> str:
        return f"{whole(self.fits)}, not {whole(self.fails)}"


class Rows:
    """The helpers of a template, over campaigns. Each campaign is read by itself, and all together once."""

    def __init__(self, folders: Sequence[Path], executor: Executor | None = None, more: More | None = None) -> None:
        self.folders = {folder.resolve().name: folder for folder in folders}
        self.executor = executor
        self.more = more or {}
        self.campaigns: dict[str, list[Cell]] = {}

    @property
    def helpers(self) -> dict[str, Any]:
        own = (
            "has",
            "measured",
            "cell",
            "cells",
            "largest",
            "at_full_depth",
            "runs",
            "pair",
            "longest",
            "grid",
            "results",
            "code_changes",
            "campaign_pages",
            "one_rank",
            "one_rank_map",
            "one_rank_error",
            "one_rank_attention_error",
            "published_error",
            "setup",
            "bandwidth",
        )
        plain = (require, evidence, grade, ms, sent_mib, gib, mfu, span, whole)
        made = {name: getattr(self, name) for name in own} | {each.__name__: each for each in plain}
        made |= {name: partial(self._of_cells, helper) for name, helper in self.more.items()}
        return made | {"pair_of": Pair}

    def _of_cells(self, helper: Callable[..., Any], *arguments: Any) -> Any:
        return helper(self.every_cell, *arguments)

    @cached_property
    def every_cell(self) -> list[Cell]:
        return cells(of_equal_steps(select(list(self.folders.values()), executor=self.executor).rows))

    @cached_property
    def settings(self) -> list[Setting]:
        return settings(self.every_cell)

    def has(self, campaign: str) -> bool:
        """Whether there are rows of it."""
        return campaign in self.folders

    def measured(self, **asked: Any) -> list[Cell]:
        """The cells of all campaigns with these values that all ranks ran on GPUs."""
        on_gpus = [
            each for each in self.every_cell if each.ok and each.processor == "GPU" and each.all_ranks_were_there
        ]
        return [each for each in on_gpus if _is_asked(each, asked)]

    def cells(self, campaign: str, **asked: Any) -> list[Cell]:
        """The measured cells of a campaign with these values of columns, or of options without a column."""
        if campaign not in self.folders:
            raise _Refused(f"campaign {campaign} is not among the folders")
        if campaign not in self.campaigns:
            rows = select([self.folders[campaign]], executor=self.executor).rows
            self.campaigns[campaign] = cells(of_equal_steps(rows))
        return [each for each in self.campaigns[campaign] if each.ok and _is_asked(each, asked)]

    def largest(self, campaign: str, column: str, **asked: Any) -> float:
        """The largest value of a column over a campaign's rows that ran, also of those without a time."""
        self.cells(campaign)
        found = [each for each in self.campaigns[campaign] if _is_asked(each, asked)]
        return max(row[column] for each in found for row in each.rows if row["status"] == "ok")

    def at_full_depth(self, campaign: str, **asked: Any) -> list[Cell]:
        """The same, with all layers of their model: those that ran with few as the line through two depths has them."""
        self.cells(campaign)
        return [each for each in at_full_depth(self.campaigns[campaign]) if each.ok and _is_asked(each, asked)]

    def runs(self, campaign: str, **asked: Any) -> list[Cell]:
        """The same in each environment, not only in the newest: a cell that ran again with other libraries or code."""
        self.cells(campaign)
        rows = select([self.folders[campaign]], every_environment=True, executor=self.executor).rows
        return [each for each in at_full_depth(cells(of_equal_steps(rows))) if each.ok and _is_asked(each, asked)]

    def cell(self, campaign: str, method: str, **asked: Any) -> Cell:
        """The one measured cell of a campaign that these values name."""
        found = self.cells(campaign, method=method, **asked)
        if len(found) != 1:
            names = "; ".join(f"{words.method(each)}, {words.place(each)}" for each in found[:4])
            raise _Refused(f"{campaign} has {counted(len(found), 'cell')} of {method} with {asked}: {names}")
        return found[0]

    def pair(
        self, campaign: str, slow: str, fast: str, of_slow: Any = None, of_fast: Any = None, **asked: Any
    ) -> "Pair":
        """The step time of one method over another's. of_slow, of_fast: values of one of them alone."""
        cell_slow = self.cell(campaign, slow, **{**asked, **(of_slow or {})})
        return Pair(self.cell(campaign, fast, **{**asked, **(of_fast or {})}), cell_slow)

    def longest(self, campaign: str, method: str, **asked: Any) -> Bracket:
        """How long a sequence one method fits with one set of options."""
        self.cells(campaign)
        known = [each for each in self.campaigns[campaign] if _is_asked(each, {"method": method, **asked})]
        found = [each for each in limits(known) if each.largest_ok and each.smallest_oom]
        if len(found) != 1:
            raise _Refused(f"{campaign} has {counted(len(found), 'bracket')} of {method} with {asked}")
        ends = found[0].largest_ok, found[0].smallest_oom
        return Bracket(*(end.asked["seq_len"] for end in ends if end))

    def grid(self, results: str, at_least: int = 0, brief: bool = False) -> str:
        """Ulysses or the ring, as a table, and under it what it is over. results: see `answers.markdown`. brief: of the
        most frequent heads, for a reader with ten seconds."""
        found = grid(self.settings, at_least, of_one_shape=brief)
        if found is None:
            raise _Refused("Ulysses and the ring did not meet")
        if brief:
            found = answers.in_brief(found)
        return f"{answers.markdown(found, results, brief)}\n*{found.caption} {answers.legend(found, brief)}*"

    def results(self) -> str:
        """Every place that was measured."""
        return findings(self.settings, self.every_cell)

    def one_rank(self) -> str:
        """Cells of one real rank beside those of all ranks."""
        return held_tables.markdown(self.every_cell)

    def one_rank_map(self, campaign: str) -> str:
        """Attention and whole steps of one real rank of a campaign."""
        return held_tables.map_markdown(self.cells(campaign))

    def one_rank_error(self) -> str:
        """How short steps of one real rank are of those of all ranks, on NVLink: 2.6% to 4.4%."""
        found = errors(held(self.every_cell), "train_step")
        if not found or found[-1] >= 0:
            raise _Refused("no step of one real rank has rows of all ranks beside it, or one is not short of them")
        return formats.span([-each for each in reversed(found)], "{:.1%}".format)

    def one_rank_attention_error(self) -> str:
        """How far attention alone of one real rank is from that of all ranks, on NVLink, at most: 6.6%."""
        if (found := largest_error(held(self.every_cell), "attention")) is None:
            raise _Refused("no attention of one real rank has rows of all ranks beside it")
        return f"{found:.1%}"

    def published_error(self) -> str:
        """How short steps of one real rank are of published ones: 7% to 9%."""
        found = beside_one_rank(self.every_cell).lines
        short = [1 - each.ratio for each in found if each.published.metric == "step_s" and each.ratio]
        if not short:
            raise _Refused("no published step has one of one real rank beside it")
        return formats.span(short, "{:.0%}".format)

    def setup(self) -> str:
        """What the rows on GPUs ran with."""
        return setup_table.markdown(self.every_cell)

    def bandwidth(self, fabric: str, primitive: str = "send_recv", ranks: int | None = None) -> str:
        """GiB/s that one GPU sends there, by the largest message: 20, or 20 to 23 of several machines. ranks: of the
        group; None: of any size."""
        found = sorted(
            round(each.bytes_per_s / GIB)
            for (_, on, _, size, by), each in bandwidths(self.every_cell).items()
            if (on, by) == (fabric, primitive) and ranks in (None, size)
        )
        if not found:
            raise _Refused(f"no row of workload=collective has {primitive} over {fabric} of {ranks or 'any'} ranks")
        return " to ".join(f"{size}" for size in dict.fromkeys((found[0], found[-1])))

    def code_changes(self) -> str:
        """A line a change: what it moves, by how much, and the campaigns with rows from before it."""
        lines = []
        for change in code_changes():
            older = {
                r["folder"]
                for cell in self.every_cell
                if change.concerns(cell)
                for r in cell.rows
                if r["started_at"] < change.at
            }
            names = ", ".join(f"`{name}`" for name in sorted(older))
            lines.append(f"- **{change.commit}**: {change.what}. {change.by}. Older: {names}.")
        return "\n".join(lines)

    def campaign_pages(self) -> str:
        """Where the rows come from."""
        return campaigns.markdown(list(self.folders.values()))[0]


class Pair(Difference):
    """A ratio that prints itself: 1.034x [1.025, 1.037]."""

    def __str__(self) -> str:
        if self.ratio is None:
            raise _Refused(f"{words.method(self.slow)} and {words.method(self.fast)} are {APART}")
        return self.words


def require(holds: bool, what: str) -> str:
    """Nothing, while it holds."""
    if not holds:
        raise _Refused(f"no longer so: {what}")
    return ""


def grade(found: Difference) -> str:
    return answers.mark(found.grade)


def evidence(*found: Difference | Cell) -> str:
    """6 replicates, grade A, FlashAttention-4; `h200x2_headline`."""
    known = [each for one in found for each in ((one.fast, one.slow) if isinstance(one, Difference) else (one,))]
    sizes = sorted({len(one.keys) if isinstance(one, Difference) else len(one.step_ms) for one in found})
    replicates = counted(sizes[-1], "replicate") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} replicates"
    pairs = [one for one in found if isinstance(one, Difference)]
    marks = sorted({one.grade.mark for one in pairs})
    grades = "modelled" if marks == [answers.EVIDENCE] else f"grade {' and '.join(marks)}" if marks else ""
    doubts = {why for one in pairs for why in one.grade.doubts.values() if why}
    kernels = words.listed_words(sorted({words.kernel(each) for each in known}))
    folders = ", ".join(sorted({f"`{row['folder']}`" for each in known for row in each.measured}))
    return f"{', '.join(filter(None, [replicates, grades, *sorted(doubts), kernels]))}; {folders}"


def ms(cell: Cell) -> str:
    return whole(cell.median_step_ms)


def sent_mib(
    method: str, layout: Any, ranks: int, window: int | None, heads: tuple[int, int, int], sends: Any = None, **of: Any
) -> str:
    """MiB that the busiest rank sends in one layer's attention, forward and backward, over 131,072 tokens in bfloat16,
    by closed form. heads: query heads, KV heads and head size. of: further fields of the shape."""
    shape = AttentionShape(1, 131072, *heads, True, "bfloat16", window=window, **of)
    sent = OF_METHODS[method](MethodConfig(method, layout, dkv_dtype="input", sends=sends), shape, ranks)
    mib = float(sum(sent.values())) / 2**20
    return f"{mib:.2g}" if mib < 100 else whole(mib)


def gib(cell: Cell) -> str:
    found = memory_gib(cell)
    return MISSING if found is None else formats.gib(found)


def mfu(cell: Cell) -> str:
    return MISSING if cell.mfu is None else f"{cell.mfu:.2f}"


def span(found: Sequence[Difference | float]) -> str:
    """1.06x to 1.08x."""
    ratios = [each.ratio if isinstance(each, Difference) else each for each in found]
    if None in ratios:
        raise _Refused(f"a pair is {APART}")
    return formats.span(filter(None, ratios), times)


def _is_asked(cell: Cell, asked: dict[str, Any]) -> bool:
    values = [(_value(cell, name), wanted) for name, wanted in asked.items()]
    return all(value == wanted for value, wanted in values)


def _value(cell: Cell, name: str) -> Any:
    """A column's, or that of the option whose path ends with this name."""
    if name in cell.asked:
        return cell.asked[name]
    found = [value for path, value in cell.options.items() if path.rpartition(".")[2] == name]
    if not found:
        raise _Refused(f"{name}: no column and no option")
    return found[-1]


def _found(templates: Sequence[Path]) -> list[Path]:
    found = []
    for path in templates:
        inside = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path] if path.suffix == SUFFIX else []
        if not inside or not all(each.is_file() for each in inside):
            raise ConfigError(
                f"--render {shown(path)}: no template; name a file that ends with {SUFFIX}, or its folder"
            )
        found += inside
    return found


def _line(error: Exception) -> int:
    """Of the template, where the error was raised: jinja gives its frames the template's lines."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<template>" else line
        trace = trace.tb_next
    return line
