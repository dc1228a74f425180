"""What a measurement was made with, as two hashes: of all that a trial depends on, and of what all trials share.

`core_id` hashes package versions, the device model and the shared measuring code. `env_id` adds the files of one
trial's method, kernel and engine. So an edit of methods/ring.py gives the trials of the ring another env_id, and they
run again; every row keeps its core_id, by which a report pools and pairs rows.

Code is hashed as syntax: docstrings, comments and formatting are not part of it, nor is the version of Python.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from sp_bench import engines, hardware, kernels, methods
from sp_bench.config.outside import Source
from sp_bench.config.trial import TrialConfig
from sp_bench.hardware import PACKAGE

NOT_MEASURING = ("driver", "report", "rows", "__main__.py", "cli.py")  # no rank imports anything of these
CHOSEN_FROM = ("methods", "kernels", "engines")  # a trial runs one file of each, and what that file imports


def env_id(config: TrialConfig) -> str:
    """8 hex digits of all that the trial is measured with. Host, UUIDs, paths and git state are not in it, so that
    equal machines share their results."""
    return _env_id(config.hardware.device, _chosen(config), _from_outside(config))


def core_id(device: str) -> str:
    """8 hex digits of what all trials on `device` (cpu or cuda) share: package versions, device model, and the
    measuring code but for what one method, kernel or engine has for itself."""
    return _core(device)[:8]


def source_hash(path: Path) -> str:
    """64 hex digits of a Python file's code, whatever its docstrings, comments and formatting."""
    source = path.read_bytes()
    try:
        return _digest(syntax(ast.parse(source, filename=str(path))))
    except SyntaxError:  # a file from outside
        return hashlib.sha256(source).hexdigest()


def outside_hash(source: Source) -> str:
    """12 hex digits of the code of a method, kernel or engine from outside, wherever it lies: of its file, or of the
    whole package that holds its module."""
    return _digest(str([(path.as_posix(), source_hash(file)) for path, file in source.files()] or source.place))[:12]


def method_source(name: str) -> str | None:
    """What a row says of the code of its method; None: the method is ours."""
    source = methods.source_of(name)
    return outside_hash(source) if source else None


def _chosen(config: TrialConfig) -> tuple[str, ...]:
    """The module of the trial's method, and of its kernel and engine where its workload runs them."""
    modules = [f"methods.{config.method.name}"]
    if config.workload.name != "collective":  # messages without attention
        modules.append(f"kernels.{config.kernel.name}")
    if config.workload.pass_kind == "step":
        modules.append(f"engines.{config.engine.name}")
    return tuple(f"sp_bench.{module}" for module in modules)


def _from_outside(config: TrialConfig) -> tuple[str, ...]:
    """The hashes of what of it comes from outside."""
    found = [
        methods.source_of(config.method.name),
        kernels.source_of(config.kernel.name) if config.workload.name != "collective" else None,
        engines.source_of(config.engine.name) if config.workload.pass_kind == "step" else None,
    ]
    return tuple(f"{source.kind} {source.name} {outside_hash(source)}" for source in found if source)


@cache
def _env_id(device: str, chosen: tuple[str, ...], from_outside: tuple[str, ...]) -> str:
    own = _with_imports(filter(None, map(_choosable_file, chosen))) - _core_files()
    return _digest(f"{_core(device)} {_listing(own)}{from_outside or ''}")[:8]


@cache
def _core(device: str) -> str:
    versions = sorted(hardware.package_versions().items())
    return _digest(f"{versions} {hardware.device_model(device)} {_listing(_core_files())}")


@cache
def _core_files() -> frozenset[Path]:
    """The shared measuring code: each file outside the folders of choice, their `__init__`, and what these import."""
    return _with_imports(
        path
        for path in PACKAGE.rglob("*.py")
        for folder in [path.relative_to(PACKAGE).parts[0]]
        if folder not in NOT_MEASURING and (folder not in CHOSEN_FROM or path.name == "__init__.py")
    )


def _with_imports(paths: Iterable[Path]) -> frozenset[Path]:
    """The files and, transitively, what they import from the folders of choice."""
    found: set[Path] = set()
    left = list(paths)
    while left:
        if (path := left.pop()) not in found:
            found.add(path)
            left += _read(path)[1]
    return frozenset(found)


def _listing(paths: Iterable[Path]) -> str:
    return str(sorted((path.relative_to(PACKAGE).as_posix(), _read(path)[0]) for path in paths))


@cache
def _read(path: Path) -> tuple[str, tuple[Path, ...]]:
    """The hash of a file of this package, and the files of the folders of choice that it imports anywhere."""
    tree = ast.parse(path.read_bytes(), filename=str(path))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    imported = filter(None, map(_choosable_file, sorted(names)))
    return _digest(syntax(tree)), tuple(imported)


def _choosable_file(module: str) -> Path | None:
    """The file of `sp_bench.methods.ring`; None for what is not a file in a folder of choice."""
    package, _, rest = module.partition(".")
    folder, _, name = rest.partition(".")
    path = PACKAGE / folder / f"{name}.py"
    return path if package == PACKAGE.name and folder in CHOSEN_FROM and name and path.exists() else None


def syntax(tree: ast.AST) -> str:
    """A syntax tree as text that is equal for equal code, on every version of Python.

    Fields that are empty are left out: a version that adds one to a node leaves it empty for older code."""
    return "".join(_tokens(tree))


def _tokens(value: Any) -> Iterator[str]:
    if isinstance(value, ast.Constant):
        yield f"{type(value.value).__name__} {value.value!a} "
    elif isinstance(value, ast.AST):
        yield f"{type(value).__name__}("
        for name in value._fields:
            if (field := getattr(value, name, None)) not in (None, []):
                yield f"{name}="
                yield from _tokens(field)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for item in value:
            if not _is_prose(item):
                yield from _tokens(item)
        yield "]"
    else:
        yield f"{value!a} "


def _is_prose(node: Any) -> bool:
    """Whether it is a statement that is only a string: a docstring, or one under a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
