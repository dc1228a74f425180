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


@cache
def read(path: Path) -> Code:
    """A file's code, parsed once a process.

    Raises:
        SyntaxError: the file is no Python.
        OSError: it cannot be read.
    """
    tree = ast.parse(path.read_bytes())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return Code(hashlib.sha256(repr(_syntax(tree)).encode()).hexdigest()[:16], frozenset(names))


def source_hash(path: Path) -> str:
    """The hash of a file's code; errors as in `read`."""
    return read(path).hash


def _syntax(node: Any) -> Any:
    """A syntax tree as nested tuples, without positions, docstrings, notation and what is empty: a version of Python
    that adds a field leaves it empty for code of the version before."""
    if isinstance(node, ast.Constant):
        return (type(node.value).__name__, ascii(node.value))
    if isinstance(node, ast.JoinedStr):
        return ("JoinedStr", *(_syntax(part) for part in node.values if not _is_empty(part)))
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if name not in NOTATION]
        return (type(node).__name__, *((name, _syntax(value)) for name, value in fields if value not in (None, [])))
    if isinstance(node, list):
        return tuple(_syntax(item) for item in node if not _is_docstring(item))
    return ascii(node)


def _is_empty(part: ast.expr) -> bool:
    """Whether a part of an f-string is an empty string: Python 3.12.1 ends f"{x:>{width}}" with one, 3.11 does not."""
    return isinstance(part, ast.Constant) and part.value == ""


def _is_docstring(node: Any) -> bool:
    """Whether it is a statement that is only a string: a docstring, or the words under a field of a dataclass."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
