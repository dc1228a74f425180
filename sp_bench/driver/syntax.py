"""The hash of a Python file's syntax. Only the standard library, so that any Python can be asked for it."""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

# How a name or constant is written, not what it is: `u""`, and whether a name is read or set.
NOTATION = ("kind", "ctx", "type_comment")


@cache
def source_hash(path: Path) -> str:
    """16 hex digits of what the file says to Python: the same for any comments, docstrings, formatting and version.

    Raises:
        SyntaxError: the file is no Python.
        OSError: it cannot be read.
    """
    return hashlib.sha256(repr(_syntax(ast.parse(path.read_bytes()))).encode()).hexdigest()[:16]


def _syntax(node: Any) -> Any:
    """A syntax tree as nested tuples, without positions, docstrings, notation and what is empty: a version of Python
    that adds a field leaves it empty for code of the version before."""
    if isinstance(node, ast.Constant):
        return (type(node.value).__name__, repr(node.value))
    if isinstance(node, ast.AST):
        return (type(node).__name__, *_fields(node))
    if isinstance(node, list):
        return tuple(_syntax(item) for item in node)
    return repr(node)


def _fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        if name not in NOTATION and value not in (None, []):
            yield name, _syntax(value)
