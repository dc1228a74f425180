"""The support matrix as text: `sp-bench methods` prints it, and docs/METHODS.md holds it between two markers."""

from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from sp_bench import kernels, methods
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.driver import support
from sp_bench.driver.support import HEADS, SP_SIZES, Support

BEGIN = "<!-- written by: sp-bench methods --write docs/METHODS.md -->\n"
END = "<!-- end of what sp-bench methods wrote -->\n"
LEGEND = f"""\
MHA, GQA, MQA: over how many ranks, of {", ".join(map(str, SP_SIZES))}, the method splits so many query/key-value heads
(of 128, one sequence), with the best of its layouts and degrees. Then the layouts that it has with a causal mask and
without, and whether a kernel that it takes runs on CPU. Sequences are whole and of one length in every method: none
takes packed ones of several lengths (varlen).
"""


def show() -> None:
    """The table; below it why not, once a reason, and which libraries are missing here."""
    found = support.all_methods()
    print(table(found), end="")
    reasons = dict.fromkeys(f"{each.name}: {each.refusal}" for each in found if each.refusal)
    missing = dict.fromkeys(each.missing_library for each in found if each.missing_library)
    for heading, lines in (("Where numbers are left out, such as", reasons), ("Not installed here", missing)):
        if lines:
            print(f"\n{heading}:", *lines, sep="\n  ")


def table(supports: Sequence[Support]) -> str:
    """Markdown, its columns aligned, and what they mean: the same on every machine."""
    heads = [f"{kind} {query}/{kv}" for kind, (query, kv) in HEADS.items()]
    headings = ["method", "variant", "library", "moves", "kernels", *heads, "causal", "not causal", "CPU"]
    rows = tabulate(map(_cells, supports), headings, tablefmt="github", disable_numparse=True)
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
    """Replace what stands between the markers of `file` by the table.

    Raises:
        ConfigError: the file cannot be rewritten or has no markers.
    """
    try:
        before, begin, rest = file.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise ConfigError(
                f"{shown(file)} has no line {BEGIN.strip()}, or none {END.strip()} after it; put both there"
            )
        file.write_text(f"{before}{begin}\n{table(support.all_methods())}\n{end}{after}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown(file)} cannot be rewritten: {error}") from None
