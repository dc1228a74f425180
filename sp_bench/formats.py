"""Numbers as text: three significant digits, binary byte units, a dash for unknown. Text for Markdown and CSV."""

import re
from collections.abc import Callable, Iterable, Sequence
from textwrap import fill
from typing import Any

MISSING = "\N{EN DASH}"
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
GIB = 2.0**30
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def number(value: float | None) -> str:
    """Three significant digits, without exponents between 0.001 and 10^9: 0.00123, 12.0, 1,230, 1,234,567."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e9:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def whole(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def byte_unit(largest: float) -> tuple[float, str]:
    """(bytes a unit, its name): the largest binary unit that leaves `largest` at 1 or more."""
    size, name = 1.0, BINARY_UNITS[0]
    for power, unit in enumerate(BINARY_UNITS):
        if abs(largest) >= 1024.0**power:
            size, name = 1024.0**power, unit
    return size, name


def in_bytes(value: float | None) -> str:
    """1,376,256 -> 1.31 MiB."""
    if value is None:
        return MISSING
    size, unit = byte_unit(value)
    return f"{value:,.0f} B" if unit == "B" and value == int(value) else f"{number(value / size)} {unit}"


def thousands(value: float) -> str:
    """160.7k."""
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e4 else number(value)


def gib(value: float) -> str:
    """0.004, 1.31, 12.3."""
    return f"{value:.2f}" if 0.01 <= value < 2 else f"{value:.1f}" if value >= 2 else f"{value:.1g}"


def span(values: Iterable[float], write: Callable[[float], str] = whole) -> str:
    """The smallest to the largest, `2 to 8`; `2` where both are written alike. There must be one."""
    found = sorted(values)
    return " to ".join(dict.fromkeys([write(found[0]), write(found[-1])]))


def counted(quantity: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{quantity:,} {noun}{'' if quantity == 1 else 's'}"


def cost_text(gpu_hours: float, price: float | None) -> str:
    """GPU-hours (8.00 at 2.5 each), to stand behind their number. price: of one, in any currency."""
    return "GPU-hours" + ("" if price is None else f" ({number(price * gpu_hours)} at {price:g} each)")


def text_table(heads: Sequence[str], lines: Sequence[Sequence[Any]], width: int | None, **look: Any) -> str:
    """A table as tabulate prints it, with its options `look`. Where it is wider than `width` columns, each line is a
    record: its values after their heads. width: None for any."""
    from tabulate import tabulate

    table = tabulate(lines, heads, disable_numparse=True, **look)
    if width is None or not lines or max(map(len, table.splitlines())) <= width:
        return table
    texts = (
        "; ".join(": ".join(filter(None, (head, str(value)))) for head, value in zip(heads, line, strict=True) if value)
        for line in lines
    )
    return "\n".join(
        fill(text, width, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False) for text in texts
    )


def csv_value(value: Any) -> Any:
    """A value of a CSV file. An apostrophe before text that a spreadsheet would run as a formula keeps it text, and a
    carriage return, which would end a line, is a line feed."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\n")) else text


def without_escapes(text: str) -> str:
    """Text without terminal escapes. Reasons in rows come from programs' output and may have them."""
    return _ESCAPES.sub("", text)


def escape_markdown(text: str) -> str:
    """Text on one line, with all marks of Markdown, its tables and HTML escaped."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")


def capital(text: str) -> str:
    """The text with its first letter as a capital."""
    return text[:1].upper() + text[1:]
