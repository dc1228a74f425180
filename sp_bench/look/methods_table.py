"""The table of which heads each method can split over how many ranks, computed from the methods: one line per variant.

`sp-bench methods` prints it, and writes that of our methods between two markers of docs/METHODS.md. Libraries count as
installed, so the table is the same on every machine. The libraries that this one lacks are listed below it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

from sp_bench import hardware, kernels, methods
from sp_bench.attention.layouts import LayoutKind
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError, parse, shown
from sp_bench.config.shape import AttentionShape
from sp_bench.driver.progress import terminal_width
from sp_bench.formats import text_table
from sp_bench.methods import refusals
from sp_bench.planning.overrides import conf_file

HEADS = {"MHA": (32, 32), "GQA": (32, 8), "MQA": (32, 1)}  # query heads, key/value heads
SP_SIZES = (1, 2, 3, 4, 8, 16, 64)


class Question(NamedTuple):
    method: MethodConfig
    kernel: str
    shape: AttentionShape
    sp_size: int

    def answer(self) -> str | None:
        """Why the method cannot split these heads over these ranks, or None."""
        return refusals.conversion_reason(self.method, ["full"]) or refusals.reason(*self)


@dataclass(frozen=True)
class Support:
    """The heads, ranks and kernels that one variant of a method supports, with any of its layouts and degrees."""

    name: str
    variant: str | None
    works: tuple[Question, ...]
    refusal: str | None  # for the first heads and ranks that do not work, with a kernel that does

    @property
    def kernels(self) -> list[str]:
        """The kernels that work."""
        return [name for name in (*kernels.NAMES, *kernels.OF_DELTA) if any(q.kernel == name for q in self.works)]

    def sp_sizes(self, heads: tuple[int, int]) -> list[int]:
        """The numbers of ranks that these heads can be split over."""
        split = {q.sp_size for q in self.works if (q.shape.num_heads, q.shape.num_kv_heads) == heads}
        return sorted(split)

    def layouts(self, *, causal: bool) -> list[str]:
        return [kind for kind in get_args(LayoutKind) if any(self._has(q, kind, causal) for q in self.works)]

    @staticmethod
    def _has(question: Question, kind: str, causal: bool) -> bool:
        return question.method.layout == kind and question.shape.causal == causal

    @property
    def on_cpu(self) -> bool:
        """Whether one of its kernels runs on the CPU."""
        shape = replace(self.works[0].shape, dtype="float32")
        return any(kernels.get(name).unsupported_reason(shape, "cpu") is None for name in self.kernels)

    @property
    def missing_library(self) -> str | None:
        """The library that this machine lacks for the method, or None."""
        return self.works[0].answer()


def default_options(name: str) -> MethodConfig:
    """The options in conf/method/<name>.yaml, or the defaults in a method's file from outside."""
    given = methods.outside_choice(name) or conf_file(f"method/{name}")
    return parse(MethodConfig, methods.with_own_options(given), "method")


def _options(name: str, variant: str | None, sp_size: int) -> Iterator[MethodConfig]:
    """All combinations of layout and, if the method has one, degree. Those of its file come first."""
    default = replace(default_options(name), variant=variant)
    degrees = [default.ulysses_degree]
    if name in methods.NAMES and "ulysses_degree" in conf_file(f"method/{name}"):
        degrees += [None, *(n for n in range(1, sp_size + 1) if sp_size % n == 0)]
    for kind, degree in product(dict.fromkeys((default.layout, *get_args(LayoutKind))), dict.fromkeys(degrees)):
        method = replace(default, layout=kind, ulysses_degree=degree)
        try:
            methods.get(name).layout(method, sp_size)
        except ConfigError:
            continue
        yield method


def of_variant(name: str, variant: str | None) -> Support:
    shape = AttentionShape(1, 8192, 32, 32, 128, True, "bfloat16")
    shapes = [
        replace(shape, num_heads=q, num_kv_heads=kv, causal=c) for (q, kv), c in product(HEADS.values(), (True, False))
    ]
    found = _asked(name, variant, kernels.NAMES, shapes)
    if found.works or not getattr(methods.get(name), "GATED_DELTA", False):
        return found
    return _asked(name, variant, kernels.OF_DELTA, [replace(each, gated_delta=True) for each in shapes if each.causal])


def _asked(name: str, variant: str | None, names: Sequence[str], shapes: Sequence[AttentionShape]) -> Support:
    questions = [
        Question(method, kernel, shape, sp_size)
        for sp_size in SP_SIZES
        for method in _options(name, variant, sp_size)
        for kernel, shape in product(names, shapes)
    ]
    with hardware.as_if_installed():
        answers = [(question, question.answer()) for question in questions]
    works = tuple(question for question, reason in answers if reason is None)
    taken, split = {q.kernel for q in works}, {(q.shape.num_kv_heads, q.sp_size) for q in works}
    refusals = (
        reason
        for question, reason in answers
        if reason and question.kernel in taken and (question.shape.num_kv_heads, question.sp_size) not in split
    )
    return Support(name, variant, works, next(refusals, None))


def our_methods() -> list[Support]:
    found = []
    for name in methods.NAMES:
        primitive = methods.get(name).PRIMITIVE
        found += [of_variant(name, variant) for variant in ([None] if isinstance(primitive, str) else primitive)]
    return found


def all_methods() -> tuple[list[Support], list[str]]:
    """Our methods and those from outside, and a line per outside method that does not load or supports nothing."""
    found, problems = our_methods(), []
    for name in methods.names()[len(methods.NAMES) :]:
        try:
            problem = methods.import_error(name)
            support = None if problem else of_variant(name, None)
        except ConfigError as error:
            support, problem = None, str(error)
        if support and support.works:
            found.append(support)
        else:
            problems.append(problem or f"{name}: {(support and support.refusal) or 'takes no kernel of ours'}")
    return found, problems


# The table as text

BEGIN = "<!-- written by: sp-bench methods --write docs/METHODS.md -->\n"
END = "<!-- end of what sp-bench methods wrote -->\n"
LEGEND = f"""\
MHA, GQA, MQA: 32 query heads and 32, 8 or 1 KV heads, of size 128. The column says how many ranks, of
{", ".join(map(str, SP_SIZES))}, can share one sequence, in some layout and degree of the method. Causal, not causal:
its layouts with that mask. Of kernels chunked and fla, which compute the gated delta rule: 32 value heads, and 32, 8 or
1 heads of queries and keys. CPU: whether one of its kernels runs there. Sequences are whole: docs/PACKING.md says who
takes packed documents.
"""


def show() -> None:
    """Print the table, each reason once, and the libraries that are missing here."""
    found, problems = all_methods()
    print(table(found, terminal_width()), end="")
    reasons = dict.fromkeys(f"{each.name}: {each.refusal}" for each in found if each.refusal)
    missing = dict.fromkeys(each.missing_library for each in found if each.missing_library)
    headings = ("Where numbers are left out, such as", "Not installed here", "From outside, and not usable")
    for heading, lines in zip(headings, (reasons, missing, problems), strict=True):
        if lines:
            print(f"\n{heading}:", *lines, sep="\n  ")


def as_json() -> list[dict[str, Any]]:
    """The table for programs, one mapping per variant, and what is printed below it."""
    return [
        {
            "method": each.name,
            "variant": each.variant,
            "library": methods.get(each.name).IMPLEMENTATION.partition("==")[0],
            "primitive": methods.primitive(each.works[0].method),
            "kernels": each.kernels,
            "sp_sizes": {f"{query}/{kv}": each.sp_sizes((query, kv)) for query, kv in HEADS.values()},
            "layouts_causal": each.layouts(causal=True),
            "layouts_not_causal": each.layouts(causal=False),
            "on_cpu": each.on_cpu,
            "refusal": each.refusal,
            "missing_library": each.missing_library,
        }
        for each in all_methods()[0]
    ]


def table(supports: Sequence[Support], width: int | None = None) -> str:
    """The table and the meaning of its columns as Markdown; the same on every machine. width: as of `text_table`."""
    heads = [f"{kind} {query}/{kv}" for kind, (query, kv) in HEADS.items()]
    headings = ["method", "variant", "library", "moves", "kernels", *heads, "causal", "not causal", "CPU"]
    rows = text_table(headings, [*map(_cells, supports)], width, tablefmt="github")
    return f"{rows}\n\n{LEGEND}"


def _cells(support: Support) -> list[str]:
    sizes = [_among(support.sp_sizes(heads), SP_SIZES) for heads in HEADS.values()]
    layouts = [", ".join(support.layouts(causal=causal)) or "-" for causal in (True, False)]
    return [
        *(support.name, support.variant or ""),
        methods.get(support.name).IMPLEMENTATION.partition("==")[0],
        methods.primitive(support.works[0].method),
        _among(support.kernels, kernels.NAMES),
        *(*sizes, *layouts),
        "yes" if support.on_cpu else "-",
    ]


def _among(found: Sequence[object], choices: Sequence[object]) -> str:
    return "all" if len(found) == len(choices) else ", ".join(map(str, found)) or "-"


def write_into(file: Path) -> None:
    """Write the table between the markers of `file`.

    Raises:
        ConfigError: the file cannot be rewritten or has no markers.
    """
    write_between(file, BEGIN, END, table(our_methods()))


def write_between(file: Path, begin_line: str, end_line: str, text: str) -> None:
    """Replace the text between two lines of `file`.

    Raises:
        ConfigError: the file cannot be rewritten or lacks one of the lines.
    """
    try:
        before, begin, rest = file.read_text().partition(begin_line)
        _, end, after = rest.partition(end_line)
        if not (begin and end):
            raise ConfigError(
                f"{shown(file)} has no line {begin_line.strip()}, or none {end_line.strip()} after it; put both there"
            )
        file.write_text(f"{before}{begin}\n{text}\n{end}{after}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown(file)} cannot be rewritten: {error}") from None
