"""Methods, kernels and engines from outside this package: where they are, how they are loaded and checked. No torch.

An installed package provides them through the entry point groups `sp_bench.methods`, `sp_bench.kernels` and
`sp_bench.engines`. A file provides one method, with the file's name, through `method.path=FILE` on the command line.
docs/OUTSIDE.md has an example.
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sp_bench.config.parsing import ConfigError, nearest, shown
from sp_bench.config.prose import Prose

Kind = Literal["method", "kernel", "engine"]

_files: dict[str, Path] = {}  # methods from files on the command line, by name


class CannotImport(Exception):
    """A source from outside raised an error while it was imported; the message names file, line and error."""


@dataclass(frozen=True)
class Source:
    """One method, kernel or engine from outside."""

    kind: Kind
    name: str
    place: Prose  # its name in errors: the file, or the module and its package
    path: Path | None = None  # only of a file on the command line
    entry: importlib.metadata.EntryPoint | None = None

    def __str__(self) -> Prose:
        return f"{self.kind} {self.name} ({self.place})"

    @property
    def file(self) -> Path | None:
        """The source file; None if it is no Python file, or if its package cannot be imported."""
        if self.path:
            return self.path
        assert self.entry is not None
        try:
            spec = importlib.util.find_spec(self.entry.module)
        except Exception:  # whatever the package's __init__ raises; `load` reports it
            return None
        origin = Path(spec.origin) if spec and spec.origin else None
        return origin if origin and origin.suffix == ".py" else None

    def files(self) -> list[tuple[Path, Path]]:
        """(path within the package, path) of each Python file of the source: the file, or all of the package that has
        the module. Empty without Python files."""
        if (file := self.file) is None:
            return []
        packages = self.entry.module.split(".")[:-1] if self.entry else []
        if file.name == "__init__.py" and self.entry:
            packages = self.entry.module.split(".")
        folder = file.parents[len(packages) - 1] if packages else file.parent
        found = sorted(folder.rglob("*.py")) if packages else [file]
        return [(path.relative_to(folder), path) for path in found]


def add_file(path: Path) -> str:
    """Register the method of a file in this process. Returns its name, which is the file's.

    Raises:
        ConfigError: no such file, a name that no method can have, or another file of that name.
    """
    said: Prose = f"method.path={shown(path)}"
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"{said} is no Python file; give a path such as method.path=my_method.py")
    name, resolved = path.stem, path.resolve()
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise ConfigError(f"{said}: a method is called as its file; use letters, digits and _, as in my_method.py")
    if (known := _files.setdefault(name, resolved)) != resolved:
        raise ConfigError(f"{said}: {shown(known)} is called {name} as well; rename one of the files")
    return name


def file_of(name: str) -> Path | None:
    """The file of the command line that brought this method, or None."""
    return _files.get(name)


def forget_files() -> None:
    """Forget all files: each command line names its own."""
    _files.clear()


def sources(kind: Kind, ours: Sequence[str]) -> dict[str, Source]:
    """Name -> source, for all sources of one kind.

    Raises:
        ConfigError: two sources have one name, or one has a name of `ours`.
    """
    found: dict[str, Source] = {}
    for source in _all(kind):
        if source.name in ours:
            raise ConfigError(f"{source}: {source.name} is a {kind} of sp_bench; rename yours")
        if other := found.get(source.name):
            raise ConfigError(f"two {kind}s are called {source.name}: {other.place} and {source.place}; rename one")
        found[source.name] = source
    return found


def source_of(kind: Kind, name: str, ours: Sequence[str]) -> Source | None:
    """The source of `name`; None if it is one of `ours` or unknown."""
    return None if name in ours else sources(kind, ours).get(name)


def require_source(kind: Kind, name: str, ours: Sequence[str]) -> Source:
    """The source of a name that is none of `ours`.

    Raises:
        ConfigError: an unknown name; the message has the nearest name and all names.
    """
    if source := source_of(kind, name, ours):
        return source
    names = [*ours, *sources(kind, ours)]
    raise ConfigError(f"{kind}={name}: {nearest(name, names)}{kind}s: {', '.join(names)}")


def _all(kind: Kind) -> Iterator[Source]:
    for entry in _entry_points(f"sp_bench.{kind}s"):
        package = f" of {entry.dist.name}" if entry.dist else ""
        yield Source(kind, entry.name, f"{entry.value}{package}", entry=entry)
    for name, path in _files.items() if kind == "method" else ():
        yield Source(kind, name, path.name, path=path)


@cache
def _entry_points(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(dict.fromkeys(importlib.metadata.entry_points(group=group)))


@cache
def load(source: Source) -> Any:
    """Import the source's module.

    Raises:
        CannotImport: it raised an error.
        ConfigError: it imports torch at its top: a plan is made without torch.
    """
    without_torch = "torch" not in sys.modules
    try:
        _refuse_torch(source)
        module = source.entry.load() if source.entry else _load_file(source)
    except ConfigError:
        raise
    except Exception as error:
        raise CannotImport(f"{source}{_line(error, source)} {type(error).__name__}: {error}") from error
    if without_torch and "torch" in sys.modules:
        raise ConfigError(
            f"{source} imports torch through a module that it imports at its top; import that module inside open, so "
            "that a plan needs no torch"
        )
    return module


def _load_file(source: Source) -> Any:
    assert source.path is not None
    name = f"sp_bench_outside.{source.name}"
    spec = importlib.util.spec_from_file_location(name, source.path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module by name
    spec.loader.exec_module(module)
    return module


def _line(error: Exception, source: Source) -> Prose:
    """The line of the source that raised the error, as ` line 3:`."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}:"
    frames = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == source.file
    ]
    return f", line {frames[-1]}:" if frames else ":"


def _refuse_torch(source: Source) -> None:
    """Refuse a source that imports torch outside functions and outside `if TYPE_CHECKING:`."""
    if source.file is None:
        return

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if any(name.split(".")[0] == "torch" for name in names):
                raise ConfigError(
                    f"{source}, line {node.lineno}: imports torch at its top; import it inside open, so that a plan "
                    "needs no torch"
                )
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source.file.read_bytes(), filename=str(source.file)))


def require(
    source: Source, module: Any, examples: Mapping[str, Prose], num_arguments: Mapping[str, int], may_be_none: str = ""
) -> None:
    """Check that a module has the attributes of its kind.

    examples: attribute -> how to write it. num_arguments: function -> its number of arguments. may_be_none: the
    function that may be None.

    Raises:
        ConfigError: it lacks an attribute, or a function takes other arguments.
    """
    for name, example in examples.items():
        if not hasattr(module, name):
            raise ConfigError(f"{source} has no {name}; write: {example}")
        value = getattr(module, name)
        if name not in num_arguments or (value is None and name == may_be_none):
            continue
        if not callable(value):
            raise ConfigError(f"{source}: {name} is no function; write: {example}")
        if not _takes(value, num_arguments[name]):
            raise ConfigError(f"{source}: {name} is called with {num_arguments[name]} arguments; write: {example}")


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True
