import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sp_bench import engines, hardware, kernels, methods
from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.method import MethodConfig
from sp_bench.costs import nccl
from sp_bench.planning import identity, source_hash

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


def edited(package, file, forget, cells, old="", new="\nADDED = 1\n"):
    """The cells whose env_id changes, and whether the core_id does, with `new` in place of `old`, which is there once;
    by default a statement is added."""
    before, core = env_ids(cells), identity.core_id("cpu")
    path = package / file
    text = path.read_text()
    assert not old or text.count(old) == 1, file
    path.write_text(text.replace(old, new) if old else text + new)
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


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config/workload.py", 'Declared("causal mask"', 'Declared("whether the mask is causal"'),
        ("config/model.py", 'Declared("query heads", unit="heads"', 'Declared("heads of queries", unit="query heads"'),
        ("config/model.py", "must be even: RoPE rotates pairs", "must be even, since RoPE rotates pairs"),
        ("config/workload.py", "{verb} workload.{option}, which is {getattr(self, option)}; ", "{verb} {option}: "),
        ("config/parsing.py", "must be positive", "must be above 0"),
        ("config/parsing.py", "did you mean {prefix}{near[0]}? ", "perhaps {prefix}{near[0]}; "),
        ("config/parsing.py", '"a whole number in plain digits"', '"a whole number"'),
        ("config/parsing.py", '"is empty; use a path such as results"', '"is empty"'),
        ("engines/__init__.py", "# whose code'", "# who wrote it'"),
        ("engines/requirements.py", "engine fsdp2 has no variable_seq_len; leave it out", "leave variable_seq_len out"),
        ("kernels/__init__.py", "runs on CUDA only; use kernel=cpu_flash or math", "needs a GPU"),
        ("kernels/cpu_flash.py", "kernel cpu_flash runs on CPU only", "cpu_flash is for CPUs"),
        ("methods/usp.py", "does not divide sp_size=", "is no divisor of sp_size="),
        ("measure/record.py", "bytes sent by {who} differ from the closed form", "{who} sent other bytes"),
        ("measure/record.py", "its bytes have no closed form", "nothing predicts its bytes"),
        ("measure/record.py", '"the ranks in the mean"', '"the mean rank"'),
        ("oracle/training_step.py", "the engine shows no gradient of {name}", "there is no gradient of {name}"),
        ("oracle/identities.py", '"sum dv = sum dout"', '"the sums of dv and dout are equal"'),
        ("worker.py", "the trial left the {setting.name} at {left}", "{setting.name} was {left}"),
        ("worker.py", '"float32 matmul precision"', '"precision of matrix products"'),
        ("measure/timing.py", "This rank's times of `num_steps` steps.", "Times of this rank."),
        ("measure/timing.py", "# resident memory of the process", "# of the process"),
        ("costs/memory/held.py", "PROCESS_BYTES = 11 * 2**27", "PROCESS_BYTES = 2 * 2**30"),
    ],
)
def test_words_and_the_estimate_of_memory_are_of_no_cell(file, old, new, package, forget, cells):
    assert edited(package, file, forget, cells, old, new) == (set(), False)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernels/math.py", "(weights * (dweights - delta) * scale)", "(weights * (dweights + delta) * scale)"),
        ("kernels/math.py", '"bhgqk,bkhd->bqhgd", weights', '"bhgqk,bkhd->bhgqd", weights'),
        (
            "measure/ledger.py",
            "self._bytes.get(key, Fraction(0)) + size",
            "self._bytes.get(key, Fraction(0)) + 2 * size",
        ),
        ("measure/ledger.py", '("all_to_all", lambda a: _slices_of_others(a[1], a))', '("all_gather", lambda a: 0)'),
        ("measure/timing.py", "1e3 * (time.perf_counter() - first)", "1e3 * (mark - first)"),
        ("measure/timing.py", "end = time.perf_counter()", "end = time.time()"),
        ("training/cross_entropy.py", "whole.sum() / divisor", "whole.mean()"),
        ("costs/attention.py", 'shape.dtype == "float64" else "float32"', 'shape.dtype == "float64" else "bfloat16"'),
        ("attention/layouts.py", 'if kind == "zigzag":', 'if kind == "striped":'),
        ("engines/libraries.py", '"cudnn": "sdpa"', '"cudnn": "eager"'),
        ("worker.py", '(r"CUBLAS_STATUS_ALLOC_FAILED", "torch")', '(r"CUBLAS_STATUS_ALLOC_FAILED", "host")'),
        ("config/model.py", "if self.head_dim % 2:", "if self.head_dim % 4:"),
        ("config/method.py", 'column="method"', 'column="how"'),
        ("config/parsing.py", "if value is not None and not value > 0:", "if value is not None and not value >= 0:"),
        ("kernels/__init__.py", 'if device != "cuda":', 'if device == "cpu":'),
        ("measure/record.py", 'left_out = ("other", *', 'left_out = ("rest", *'),
    ],
)
def test_what_decides_is_of_the_cells_that_run_it(file, old, new, package, forget, cells):
    changed, core = edited(package, file, forget, cells, old, new)
    assert changed
    assert core == (file != "engines/libraries.py")


def test_no_rank_imports_the_estimate_of_memory_or_what_engines_refuse():
    names = {"methods": methods.NAMES, "kernels": (*kernels.NAMES, *kernels.OF_DELTA), "engines": engines.NAMES}
    own = [hardware.PACKAGE / folder / f"{name}.py" for folder, each in names.items() for name in each]
    found = identity._with_imports([*own, *identity._shared()])
    ranks = {path.relative_to(hardware.PACKAGE).as_posix() for path in found}
    assert not [path for path in ranks if path.startswith(("costs/memory", "costs/patterns", "engines/requirements"))]


def test_other_memory_outside_the_allocator_is_of_one_rank_alone(make_config, monkeypatch):
    of_ranks, of_one = make_config(), make_config(world="one_rank")
    before = [identity.env_id(each) for each in (of_ranks, of_one)]
    monkeypatch.setattr(nccl, "known", lambda: nccl.Held(2.0))
    after = [identity.env_id(each) for each in (of_ranks, of_one)]
    assert after[0] == before[0]
    assert after[1] != before[1]


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


PROSE = """
class Finding(NamedTuple):
    error: float
    message: Prose
    kind: str = "loss"


def reason(kind: str, what: Prose) -> Prose | None:
    words: Prose = f"no {kind}"
    if kind == "a":
        return f"{words} of {what}: use one"
    assert kind in ("b", "c"), "kind"
    print("found", kind)
    if kind == "b":
        raise ValueError("of " + what if what else "nothing", LIMIT)
    return reason("d", "many") or "e" + what


def name(kind: str) -> str:
    return Finding(0.5, "too large", "mean").kind or "f"
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('f"no {kind}"', '"none"'),
        ("{words} of {what}: use one", "use one {kind}"),
        ('"kind"', '"one of two"'),
        ('"found"', '"seen"'),
        ('"of "', '"from "'),
        ('"nothing"', 'f"nothing at {LIMIT}"'),
        ('"many"', 'several(f"things")'),
        ('"e"', '"eh"'),
        ('"too large"', '"too" + " small"'),
        ("    message: Prose\n", ""),
    ],
)
def test_what_is_annotated_as_prose_raised_or_printed_changes_no_hash(old, new, tmp_path, forget):
    assert PROSE.count(old) == 1
    changed = PROSE.replace(old, new)
    if "message" in old:  # a field less
        changed = changed.replace('0.5, "too large", ', "0.5, ")
    assert hashed(changed, tmp_path / "a.py", forget) == hashed(PROSE, tmp_path / "a.py", forget)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('kind == "a"', 'kind == "x"'),
        ('("b", "c")', '("b", "x")'),
        ("if what else", "if LIMIT else"),
        ("ValueError(", "TypeError("),
        (", LIMIT)", ", LIMITS)"),
        ('reason("d"', 'reason("x"'),
        ('"mean"', '"sum"'),
        ('or "f"', 'or "x"'),
        ('"nothing"', '""'),
        ('kind: str = "loss"', 'kind: str = "x"'),
    ],
)
def test_other_strings_and_what_chooses_between_texts_change_the_hash(old, new, tmp_path, forget):
    assert PROSE.count(old) == 1
    changed = PROSE.replace(old, new)
    assert hashed(changed, tmp_path / "a.py", forget) != hashed(PROSE, tmp_path / "a.py", forget)


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
