import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sp_bench import hardware
from sp_bench.config.trial import EngineConfig, KernelConfig, MethodConfig
from sp_bench.driver import identity, source_hash

CODE = '''
"""What it is about."""
import os


class Thing:
    """A thing."""

    width: int = 3
    """In characters."""

    def size(self, *parts, scale: float = 2.5, **more) -> "int":
        """Its size."""
        # why
        name = f"{parts!r:>{scale}} of {os.name}" "and on"
        return [b"x", 10_000, True, None, ..., 1j][0] if (n := len(parts)) > 1 else lambda x, /, y=1: {x: y, **more}


async def main():
    async with a as b, c:
        match b:
            case [1, *rest] | {"k": rest}:
                yield rest
'''
DIGEST = "f64c1bda1cf56bdc"


@pytest.fixture
def forget():
    """What is known of the package's files is asked of them again."""
    caches = [identity.core_id, identity._env_id, source_hash._read, identity._shared]

    def clear() -> None:
        for cache in caches:
            cache.cache_clear()

    clear()
    yield clear
    clear()


@pytest.fixture
def package(tmp_path, monkeypatch, forget):
    """A copy of the package that a test may edit."""
    copy = tmp_path / "sp_bench"
    shutil.copytree(hardware.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "conf"))
    monkeypatch.setattr(hardware, "PACKAGE", copy)
    return copy


@pytest.fixture
def cells(make_config):
    """A cell of each method and kernel that the tests edit, and training steps."""
    ring = make_config(method="ring", kernel="math")
    step = make_config(workload="train_step", kernel="math")
    return {
        "ring": ring,
        "ulysses": replace(ring, method=MethodConfig("ulysses")),
        "cpu_flash": replace(ring, kernel=KernelConfig("cpu_flash")),
        "exchange": make_config(method="ring", workload="collective", kernel="cpu_flash"),
        "deepspeed": replace(ring, method=MethodConfig("deepspeed_ulysses")),
        "fsdp2": step,
        "trl_sft": replace(step, engine=EngineConfig("trl_sft")),
    }


def env_ids(cells):
    return {name: identity.env_id(config) for name, config in cells.items()}


def edited(package, file, forget, cells):
    """The cells whose env_id changes with a statement added to `file`, and whether the core_id does."""
    before, core = env_ids(cells), identity.core_id("cpu")
    path = package / file
    path.write_text(f"{path.read_text()}\nADDED = 1\n")
    forget()
    after = env_ids(cells)
    return {name for name in cells if before[name] != after[name]}, core != identity.core_id("cpu")


def test_ids_are_8_hex_digits_and_the_same_wherever_the_package_lies(cells, package, forget, monkeypatch):
    there = env_ids(cells)
    monkeypatch.undo()
    forget()
    assert env_ids(cells) == there
    for found in (*there.values(), identity.core_id("cpu")):
        assert len(found) == 8
        assert set(found) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("file", "cells_of"),
    [
        ("methods/ring.py", {"ring", "cpu_flash", "exchange"}),
        ("methods/_deepspeed.py", {"deepspeed", "trl_sft"}),
        ("kernels/cpu_flash.py", {"cpu_flash"}),
        ("engines/trainer_loop.py", {"trl_sft"}),
    ],
)
def test_an_edited_file_of_a_method_kernel_or_engine_is_of_its_own_cells_alone(file, cells_of, package, forget, cells):
    assert edited(package, file, forget, cells) == (cells_of, False)


@pytest.mark.parametrize(
    "file",
    ["worker.py", "attention/exchange.py", "methods/__init__.py", "kernels/math.py", "workloads/attention.py"],
)
def test_an_edited_file_that_all_share_is_of_every_cell(file, package, forget, cells):
    assert edited(package, file, forget, cells) == (set(cells), True)


def test_code_is_edited_once_a_statement_of_the_trial_is_another(package, forget, cells):
    """A process that has read the files long ago sees it; a comment, and a file of another method, are no edit."""
    before = env_ids(cells)

    def edited_cells() -> set[str]:
        return {name for name, config in cells.items() if identity.is_edited(config, before[name])}

    path = package / "methods" / "ring.py"
    text = path.read_text()
    path.write_text(f"# a comment\n{text}")
    assert edited_cells() == set()
    path.write_text(f"{text}\nADDED = 1\n")
    assert edited_cells() == {"ring", "cpu_flash", "exchange"}
    path.write_text(f"{text}\nhalf of a stat")
    assert edited_cells() == {"ring", "cpu_flash", "exchange"}
    path.write_text(text)
    assert edited_cells() == set()


@pytest.mark.parametrize("file", ["driver/campaign.py", "analysis/cells.py", "rows/schema.py", "cli/run.py"])
def test_code_that_no_rank_runs_is_of_no_cell(file, package, forget, cells):
    assert edited(package, file, forget, cells) == (set(), False)


def test_another_library_or_device_is_of_every_cell(cells, forget, monkeypatch):
    before = env_ids(cells)
    for name, value in (("package_versions", lambda: {"torch": "0"}), ("device_model", lambda device: "another")):
        with monkeypatch.context() as patch:
            patch.setattr(hardware, name, value)
            forget()
            assert not set(before.values()) & set(env_ids(cells).values())


def hashed(text, path, forget):
    path.write_text(text)
    forget()
    return source_hash.source_hash(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    """A thing."""\n', '    """Another word."""\n'),
        ('        """Its size."""\n', ""),
        ('    """In characters."""\n', ""),
        ("        # why\n", "\n\n        # why not\n"),
        ("10_000", "10000"),
        ('"int"', "'int'"),
        ("import os\n", "import os; \n"),
    ],
)
def test_prose_and_formatting_change_no_hash(old, new, tmp_path, forget):
    assert old in CODE
    assert hashed(CODE.replace(old, new), tmp_path / "a.py", forget) == DIGEST


@pytest.mark.parametrize(
    ("old", "new"),
    [("2.5", "2.25"), ("size", "sizes"), ('b"x"', '"x"'), ("True", "1"), ("of {os", "in {os"), ("x, /, y", "x, y")],
)
def test_a_changed_constant_name_or_statement_changes_the_hash(old, new, tmp_path, forget):
    assert old in CODE
    assert hashed(CODE.replace(old, new), tmp_path / "a.py", forget) != DIGEST


def test_every_python_gives_the_same_hash(tmp_path, forget):
    """Whichever runs this test: the digest is written down."""
    assert hashed(CODE, tmp_path / "a.py", forget) == DIGEST


def other_python() -> Path | None:
    """Another Python that is new enough for the package, from PATH or from pyenv."""
    names = ("python3.12", "python3.13", "python3.14")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [Path(path) for name in names if (path := shutil.which(name))]
    found += sorted(pyenv.glob("3.1[2-4].*/bin/python"))
    versions = ((path, subprocess.run([path, "--version"], capture_output=True, text=True).stdout) for path in found)
    own = f"Python {sys.version_info.major}.{sys.version_info.minor}."
    return next((path for path, version in versions if version and not version.startswith(own)), None)


def test_another_python_gives_the_same_hash_of_every_file(tmp_path, forget):
    other = other_python()
    if other is None:
        pytest.skip("no python3.12, python3.13 or python3.14 here beside the one that runs the tests")
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); from source_hash import source_hash\n"
        "for path in sys.argv[2:]: print(source_hash(pathlib.Path(path)))"
    )
    (tmp_path / "code.py").write_text(CODE)
    files = [tmp_path / "code.py", *sorted(hardware.PACKAGE.rglob("*.py"))]
    folder = Path(source_hash.__file__).parent
    done = subprocess.run([other, "-c", code, folder, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [source_hash.source_hash(path) for path in files]
