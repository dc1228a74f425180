"""Identities of the measuring code: hashes of the packages, the device and the code that a rank runs.

`core_id` covers what every trial shares; `env_id` adds the files of the trial's own method, kernel and engine. So an
edit of one method measures that method again, and its new rows still pair with everybody else's.
Code is hashed as syntax without prose: see source_hash.py.
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from sp_bench import engines, hardware, kernels, methods
from sp_bench.config.outside import Source
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import nccl
from sp_bench.kernels import REFERENCE
from sp_bench.planning.source_hash import read, source_hash

# Of these folders, a trial runs the files that its config names.
SOURCE_OF = {"methods": methods.source_of, "kernels": kernels.source_of, "engines": engines.source_of}


def env_id(config: TrialConfig, model: str | None = None) -> str:
    """8 hex digits: what this trial is measured with. Part of the row's file name; equal on equal machines.

    model: the device's name, as `hardware.device_model` gives it there; None: that of this machine.
    """
    named = {("methods", config.method_of(kind).name) for kind in config.kinds}
    if config.workload.name != "collective":  # messages without attention
        named |= {("kernels", config.kernel_of(kind)) for kind in config.kinds}
    if config.workload.pass_kind == "step":
        named.add(("engines", config.engine.name))
    sources = (SOURCE_OF[folder](name) for folder, name in sorted(named, reverse=True))
    from_outside = tuple(f"{source.kind} {source.name} {outside_hash(source)}" for source in sources if source)
    if config.world == "one_rank":  # a file of numbers that caps its memory, and no code
        from_outside += (f"outside the allocator {nccl.known()}",)
    return _env_id(config.hardware.device, model, tuple(sorted(named)), from_outside)


def is_edited(config: TrialConfig, planned_with: str) -> bool:
    """Whether this trial's code is no longer that of `planned_with`, its env_id: ranks import what the files are when
    they start, which may be hours after the plan."""
    for known in (_env_id, core_id, _shared, outside_hash):  # they hold the hashes at the time of the plan
        known.cache_clear()
    try:
        return env_id(config) != planned_with
    except (SyntaxError, OSError):  # it is being written
        return True


def method_source(name: str) -> str | None:
    """8 hex digits of the code of a method from outside, for its rows; None: the method is ours."""
    source = methods.source_of(name)
    return outside_hash(source) if source else None


@cache
def outside_hash(source: Source) -> str:
    """8 hex digits of the code of a method, kernel or engine from outside, wherever it lies: of its file, or of all
    files of the package that holds its module."""
    return _digest([source.name, *(f"{place.as_posix()} {_hash_of_any(file)}" for place, file in source.files())])


def _hash_of_any(file: Path) -> str:
    try:
        return source_hash(file)
    except SyntaxError:  # its trials end as `error`
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


@cache
def core_id(device: str, model: str | None = None) -> str:
    """8 hex digits: what every trial on `device` (cpu or cuda) is measured with, whatever its method, kernel or engine.

    Rows of one core_id may be compared. `model`: as of `env_id`.
    """
    environment = repr((sorted(hardware.package_versions().items()), model or hardware.device_model(device)))
    return _digest([environment, *(_file_hash(path) for path in _shared())])


@cache
def _env_id(device: str, model: str | None, named: tuple[tuple[str, str], ...], from_outside: tuple[str, ...]) -> str:
    files = [hardware.PACKAGE / folder / f"{name}.py" for folder, name in named]
    own = _with_imports(files) - set(_shared())
    return _digest([core_id(device, model), *(_file_hash(path) for path in sorted(own)), *from_outside])


def _file_hash(path: Path) -> str:
    return f"{path.relative_to(hardware.PACKAGE).as_posix()} {source_hash(path)}"


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:8]


@cache
def _shared() -> tuple[Path, ...]:
    """The files that a rank can import in any trial: from its first file, a workload and the oracle's kernel on."""
    package = hardware.PACKAGE
    found_by_name = [*package.glob("workloads/*.py"), package / "kernels" / f"{REFERENCE}.py"]
    return tuple(sorted(_with_imports([package / "worker.py", *found_by_name])))


def _with_imports(paths: Iterable[Path]) -> set[Path]:
    """These files and all that they import of the package, directly or not."""
    left, found = list(paths), set()
    while left:
        path = left.pop()
        if path not in found and path.is_file():
            found.add(path)
            left += [path.parent / "__init__.py", *_imports(path)]
    return found


def _imports(path: Path) -> tuple[Path, ...]:
    """Where the package's modules that a file imports would lie; not all of these paths exist."""
    places = [
        hardware.PACKAGE.joinpath(*name.split(".")[1:])
        for name in read(path).imports
        if name.split(".")[0] == "sp_bench"
    ]
    return tuple(file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
