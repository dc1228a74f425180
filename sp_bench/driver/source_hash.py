"""A Python file's imports, and the hash of its syntax. Only the standard library, so that any Python can be asked."""

import ast
import hashlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# How a name or constant is written, not what it is: `u""`, and whether a name is read or set.
NOTATION = ("kind", "ctx", "type_comment")


class Code(NamedTuple):
    hash: str  # 16 hex digits, equal for any comments, docstrings, formatting and version of Python
    imports: frozenset[str]  # dotted names of modules, and of what is imported from them, anywhere in the file


def read(path: Path) -> Code:
    """A file's code, read anew once the file has changed.

    Raises:
        SyntaxError: the file is no Python.
        OSError: it cannot be read.
    """
    now = path.stat()
    return _read(path, now.st_mtime_ns, now.st_size)


@cache
def _read(path: Path, mtime_ns: int, size: int) -> Code:
    return _parsed(path.read_bytes())


@cache
def _parsed(source: bytes) -> Code:
    """The code of a text, parsed once, however many files have it: a copy of the package is as fast as the package."""
    names: set[str] = set()
    syntax: list[str] = []
    _write(ast.parse(source), syntax, names)
    return Code(hashlib.sha256("\0".join(syntax).encode()).hexdigest()[:16], frozenset(names))


def source_hash(path: Path) -> str:
    """The hash of a file's code; errors as in `read`."""
    return read(path).hash


def _write(node: Any, out: list[str], names: set[str]) -> None:
    """Append a syntax tree to `out`, and what it imports to `names`.

    It is written without positions, docstrings, notation and what is empty: a version of Python that adds a field
    leaves it empty for code of the version before. A plan reads 70 files, so each is walked once, and written flat.
    """
    kind = type(node)
    if kind is list:
        out.append("[")
        for item in node:
            if not _is_docstring(item):
                _write(item, out, names)
        out.append("]")
    elif kind is ast.Constant:
        out += (type(node.value).__name__, ascii(node.value))
    elif isinstance(node, ast.AST):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        out += (kind.__name__, "(")
        for name in _FIELDS.get(kind) or _fields(kind):
            value = getattr(node, name, None)
            if value is not None and value != []:
                out.append(name)
                if kind is ast.JoinedStr:
                    value = [part for part in value if not _is_empty(part)]
                _write(value, out, names)
        out.append(")")
    else:
        out.append(ascii(node))


_FIELDS: dict[type, tuple[str, ...]] = {}


def _fields(kind: type) -> tuple[str, ...]:
    _FIELDS[kind] = tuple(name for name in kind._fields if name not in NOTATION)
    return _FIELDS[kind]


def _is_empty(part: ast.expr) -> bool:
    """Whether a part of an f-string is an empty string: Python 3.12.1 ends f"{x:>{width}}" with one, 3.11 does not."""
    return isinstance(part, ast.Constant) and part.value == ""


def _is_docstring(node: Any) -> bool:
    """Whether it is a statement that is only a string: a docstring, or the words under a field of a dataclass."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
