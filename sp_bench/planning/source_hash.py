"""A Python file's imports, and the hash of its syntax without prose. Only the standard library: any Python can run it.

Prose is text for people, which decides nothing that is measured:
- comments and docstrings;
- strings that an error is raised with, that an assert or `print` says;
- what is annotated `Prose` (config/prose.py): strings that such a function returns or such a variable holds; such a
  field of a class; and what calls in the same file give for such a field or parameter. Calls of `Declared`
  (config/declared.py) are read so in every file.

What chooses between two texts stays, and so does every other string: a dtype, an einsum, a key, what an error's text is
compared with.
"""

import ast
import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# How a name or constant is written, not what it is: `u""`, and whether a name is read or set.
NOTATION = ("kind", "ctx", "type_comment")


class Code(NamedTuple):
    hash: str  # 16 hex digits, equal for any prose, formatting and version of Python
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
    tree = ast.parse(source)
    prose = _prose_arguments(tree) if b"Prose" in source else {}
    syntax = _Syntax(tree, _of_declarations() | prose if b"Declared" in source else prose)
    return Code(hashlib.sha256("\0".join(syntax.text).encode()).hexdigest()[:16], frozenset(syntax.imports))


def source_hash(path: Path) -> str:
    """The hash of a file's code; errors as in `read`."""
    return read(path).hash


class _Syntax:
    """A syntax tree as flat text, and what it imports.

    It is written without prose, positions, notation and what is empty: a version of Python that adds a field leaves it
    empty for code of the version before. A plan reads 60 files, so each is walked once.
    """

    def __init__(self, tree: ast.Module, prose_arguments: Mapping[str, set[int | str]]) -> None:
        self.text: list[str] = []
        self.imports: set[str] = set()
        self._prose_arguments = prose_arguments
        self._returns_prose = False  # whether the function at hand does
        self._write(tree)

    def _write(self, node: Any) -> None:
        kind = type(node)
        if kind is list:
            self.text.append("[")
            for item in node:
                if not _is_docstring(item):
                    self._write(item)
            self.text.append("]")
        elif kind is ast.Constant:
            self.text += (type(node.value).__name__, ascii(node.value))
        elif isinstance(node, ast.AST):
            if kind in _READ:
                _READ[kind](self, node)
            outer = self._returns_prose
            if kind in _FUNCTIONS:
                self._returns_prose = _is_prose(getattr(node, "returns", None))
            self.text += (kind.__name__, "(")
            for name in _FIELDS.get(kind) or _fields(kind):
                value = getattr(node, name, None)
                if value is not None and value != []:
                    self.text.append(name)
                    self._write(value)
            self.text.append(")")
            self._returns_prose = outer
        else:
            self.text.append(ascii(node))

    # What is noted of a node, or taken out of it, before it is written.

    def _import(self, node: ast.Import) -> None:
        self.imports.update(alias.name for alias in node.names)

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.module:
            self.imports.add(node.module)
            self.imports.update(f"{node.module}.{alias.name}" for alias in node.names)

    def _f_string(self, node: ast.JoinedStr) -> None:
        node.values = [part for part in node.values if not _is_empty(part)]

    def _raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call):
            node.exc.args = list(map(_without_words, node.exc.args))

    def _assert(self, node: ast.Assert) -> None:
        node.msg = node.msg and _without_words(node.msg)

    def _return(self, node: ast.Return) -> None:
        if self._returns_prose and node.value:
            node.value = _without_words(node.value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        if _is_prose(node.annotation) and node.value:
            node.value = _without_words(node.value)

    def _class(self, node: ast.ClassDef) -> None:
        node.body = [each for each in node.body if not (isinstance(each, ast.AnnAssign) and _is_prose(each.annotation))]

    def _call(self, node: ast.Call) -> None:
        name = _called(node)
        if name == "print":
            node.args = list(map(_without_words, node.args))
        elif left_out := self._prose_arguments.get(name):
            node.args = [each for place, each in enumerate(node.args) if place not in left_out]
            node.keywords = [each for each in node.keywords if each.arg not in left_out]


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_READ: dict[type, Callable[[_Syntax, Any], None]] = {
    ast.Import: _Syntax._import,
    ast.ImportFrom: _Syntax._import_from,
    ast.JoinedStr: _Syntax._f_string,
    ast.Raise: _Syntax._raise,
    ast.Assert: _Syntax._assert,
    ast.Return: _Syntax._return,
    ast.AnnAssign: _Syntax._annotated,
    ast.ClassDef: _Syntax._class,
    ast.Call: _Syntax._call,
}
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


WORDS = ast.Constant(...)  # in place of a text that is not empty; whether one is empty may decide


def _without_words(node: ast.expr) -> ast.expr:
    """An expression that gives text, with WORDS in place of strings, f-strings and joined ones. What chooses between
    them stays."""
    match node:
        case ast.Constant(value=str(text)) if text:
            return WORDS
        case ast.JoinedStr() | ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="join")):
            return WORDS
        case ast.BinOp(op=ast.Add()):
            node.left, node.right = _without_words(node.left), _without_words(node.right)
            return WORDS if node.left is node.right is WORDS else node
        case ast.IfExp():
            node.body, node.orelse = _without_words(node.body), _without_words(node.orelse)
        case ast.BoolOp() | ast.Dict():
            node.values = list(map(_without_words, node.values))
    return node


def _is_prose(annotation: ast.expr | None) -> bool:
    """Whether it is Prose, Prose | None, or a mapping to such, whose keys are no prose."""
    match annotation:
        case ast.Name(id="Prose") | ast.BinOp(left=ast.Name(id="Prose")):
            return True
        case ast.Subscript(value=ast.Name(id="Mapping"), slice=ast.Tuple(elts=[_, value])):
            return _is_prose(value)
    return False


def _prose_arguments(tree: ast.Module) -> dict[str, set[int | str]]:
    """Classes, functions and methods of a file -> which of their arguments are prose, by place and by name."""
    found: dict[str, set[int | str]] = {}
    methods = [each for node in tree.body if isinstance(node, ast.ClassDef) for each in node.body]
    for node in [*tree.body, *methods]:
        match node:
            case ast.ClassDef():  # a dataclass
                fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                places = [(ast.unparse(each.target), each.annotation) for each in fields]
            case ast.FunctionDef(args=each) | ast.AsyncFunctionDef(args=each):
                places = [
                    (a.arg, a.annotation) for a in (*each.posonlyargs, *each.args) if a.arg not in ("self", "cls")
                ]
            case _:
                continue
        own: set[int | str] = set()
        for place, (name, annotation) in enumerate(places):
            if _is_prose(annotation):
                own |= {place, name}
        found[node.name] = found.get(node.name, own) & own  # of two with one name, what both have
    return found


@cache
def _of_declarations() -> dict[str, set[int | str]]:
    """Which arguments of `Declared` are prose."""
    return _prose_arguments(ast.parse((Path(__file__).parents[1] / "config" / "declared.py").read_bytes()))


def _called(node: ast.Call) -> str:
    """The last part of the name of what is called; empty: it has none."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
