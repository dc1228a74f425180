"""Escapes any text for LaTeX: stock pdflatex prints it unchanged, without commands, ligatures or missing characters."""

import unicodedata

from sp_bench.formats import without_escapes

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%",
    "_": r"\_\allowbreak{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    '"': r"\texttt{\char34}", "`": r"\textquoteleft{}", "'": "'{}",
    # after \\ these two would be its arguments; two hyphens would be a dash
    "[": "{[}", "]": "{]}", "*": "{*}", "-": "-{}",
    "\N{EN DASH}": "--{}", "\N{EM DASH}": "---{}", "\N{MINUS SIGN}": "$-$", "\N{HYPHEN}": "-{}",
    "\N{NON-BREAKING HYPHEN}": "-{}", "\N{NO-BREAK SPACE}": "~", "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}",
    "\N{LEFT SINGLE QUOTATION MARK}": "`{}", "\N{RIGHT SINGLE QUOTATION MARK}": "'{}",
    "\N{LEFT DOUBLE QUOTATION MARK}": "``{}", "\N{RIGHT DOUBLE QUOTATION MARK}": "''{}",
    "\N{MULTIPLICATION SIGN}": r"$\times$", "÷": r"$\div$", "±": r"$\pm$", "·": r"$\cdot$", "≠": r"$\neq$",
    "≤": r"$\leq$", "≥": r"$\geq$", "≈": r"$\approx$", "∞": r"$\infty$", "√": r"$\surd$",
    "→": r"$\rightarrow$", "←": r"$\leftarrow$", "↔": r"$\leftrightarrow$",
    "°": r"$^{\circ}$", "²": r"$^{2}$", "³": r"$^{3}$", "†": r"$^{\dagger}$", "‡": r"$^{\ddagger}$",
    "•": r"$\bullet$", "§": r"$\mathsection$", "¶": r"$\mathparagraph$", "ß": r"\ss{}",
    "æ": r"\ae{}", "Æ": r"\AE{}", "œ": r"\oe{}", "Œ": r"\OE{}", "ø": r"\o{}", "Ø": r"\O{}", "å": r"\aa{}",
    "Å": r"\AA{}", "ł": r"\l{}", "Ł": r"\L{}", "\N{LATIN SMALL LETTER DOTLESS I}": r"\i{}",
}  # fmt: skip
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi"
_SPECIAL |= {
    unicodedata.lookup(f"GREEK SMALL LETTER {'LAMDA' if name == 'lambda' else name.upper()}"): rf"$\{name}$"
    for name in [*_GREEK.split(), "omega"]
}
_SPECIAL |= {
    unicodedata.lookup(f"GREEK CAPITAL LETTER {'LAMDA' if name == 'Lambda' else name.upper()}"): rf"$\{name}$"
    for name in ("Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega")
}
_SPECIAL["\N{MICRO SIGN}"] = _SPECIAL["\N{GREEK SMALL LETTER MU}"]
_ACCENTS = {
    "\N{COMBINING GRAVE ACCENT}": "`", "\N{COMBINING ACUTE ACCENT}": "'", "\N{COMBINING CIRCUMFLEX ACCENT}": "^",
    "\N{COMBINING TILDE}": "~", "\N{COMBINING DIAERESIS}": '"', "\N{COMBINING MACRON}": "=",
    "\N{COMBINING CARON}": "v", "\N{COMBINING CEDILLA}": "c", "\N{COMBINING DOT ABOVE}": ".",
}  # fmt: skip


def escape(text: str) -> str:
    """ASCII only, on one line. Characters that the fonts of stock pdflatex lack are named: U+1F600."""
    return "".join(map(_character, " ".join(without_escapes(text).split())))


def length(text: str) -> int:
    """Characters that are printed."""
    named = sum(_character(c).startswith("{[}U+") for c in text)
    return len(text) + named * len("U+1F600]")


def _character(character: str) -> str:
    if character in _SPECIAL:
        return _SPECIAL[character]
    if " " <= character <= "~":
        return character
    base, *marks = unicodedata.normalize("NFD", character)
    if base.isascii() and base.isalpha() and len(marks) == 1 and marks[0] in _ACCENTS:
        return rf"\{_ACCENTS[marks[0]]}{{{base}}}"
    return f"{{[}}U+{ord(character):04X}{{]}}"
