"""Sources from outside: their names and their identities."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sp_bench import engines, kernels, methods
from sp_bench.analysis.identifiers import name_cells
from sp_bench.config import outside
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.outside import Source
from sp_bench.config.parsing import ConfigError
from sp_bench.engines import requirements
from sp_bench.planning import identity, plan
from sp_bench.rows.schema import SCHEMA

from .rows import row

METHOD = """
from sp_bench.attention.layouts import SequenceLayout
IMPLEMENTATION = "my_lab"
PRIMITIVE = "none"
traffic = None
def layout(method, sp_size): return SequenceLayout(method.layout, ring_degree=sp_size)
def unsupported_reason(method, kernel_name, shape, sp_size): return None
def open(method, kernel, shape, mesh): ...
"""
KERNEL = """
CUDA_KERNELS = None
def unsupported_reason(shape, device): return "my_kernel is out of office"
def forward(q, k, v, *, causal, scale): ...
def backward(dout, q, k, v, out, lse, *, causal, scale): ...
"""
ENGINE = """
IMPLEMENTATION = "my_lab 3"
BATCH_LOADING = "in_step"
UNPREDICTED = ()
UNLABELLED = 0
def unsupported_reason(config): return "my_engine is out of fuel"
def traffic(config, padded_len): return {}
def run(config, texts, mesh, device, tick, *, token_losses, watch=None): ...
"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No source of another test is known."""
    yield
    outside.forget_files()
    outside._entry_points.cache_clear()


Bring = Callable[..., None]


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bring:
    """`bring("kernel", "my_kernel", text)` installs a package of one module and the entry point that names it."""

    def bring(kind: str, name: str, text: str, package: str | None = None) -> None:
        site = tmp_path / (package or f"{name}_package")
        info = site / f"{site.name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{site.name}_{kind}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {site.name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[sp_bench.{kind}s]\n{name} = {site.name}_{kind}\n")
        monkeypatch.syspath_prepend(str(site))
        outside._entry_points.cache_clear()

    return bring


def add(folder: Path, text: str = METHOD, name: str = "mine") -> str:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return methods.add_file(folder / f"{name}.py")


def test_a_kernel_and_an_engine_from_a_package_are_asked_what_they_can_run(bring, make_config):
    bring("kernel", "my_kernel", KERNEL)
    bring("engine", "my_engine", ENGINE)
    assert kernels.names()[-1] == "my_kernel"
    assert engines.names()[-1] == "my_engine"
    config = make_config(method="ring", workload="train_step")
    other = replace(config, kernel=KernelConfig("my_kernel"))
    assert plan.unsupported_reason(other, None) == "my_kernel is out of office"
    other = replace(config, engine=replace(config.engine, name="my_engine"))
    assert plan.unsupported_reason(other, None) == "my_engine is out of fuel"
    assert requirements.implementation(other.engine) == "my_lab 3"
    assert (
        len({identity.env_id(each) for each in (config, other, replace(config, kernel=KernelConfig("my_kernel")))}) == 3
    )


@pytest.mark.parametrize(("package", "name"), [(kernels, "kernel"), (engines, "engine"), (methods, "method")])
def test_what_nobody_brings_is_refused_with_all_names(package, name):
    with pytest.raises(ConfigError, match=f"^{name}=nobody: {name}s: {package.NAMES[0]}, "):
        package.get("nobody")


@pytest.mark.parametrize(
    ("kind", "text", "lacking", "package"),
    [("kernel", KERNEL, "backward", kernels), ("engine", ENGINE, "UNLABELLED", engines)],
)
def test_what_a_kernel_or_an_engine_lacks_is_named(bring, kind, text, lacking, package):
    bring(kind, "mine", text.replace(lacking, "other"), package=f"lacks_{kind}")
    with pytest.raises(
        ConfigError, match=rf"{kind} mine \(lacks_{kind}_{kind} of lacks_{kind}\) has no {lacking}; write: "
    ):
        package.get("mine")


@pytest.mark.parametrize("kind", ["kernel", "engine"])
def test_what_cannot_be_imported_says_so_when_it_runs(bring, kind):
    bring(kind, "mine", "1 / 0", package=f"broken_{kind}")
    stand_in = {"kernel": kernels, "engine": engines}[kind].get("mine")
    with pytest.raises(ImportError, match="line 1: ZeroDivisionError: division by zero"):
        getattr(stand_in, {"kernel": "forward", "engine": "run"}[kind])()


def test_two_sources_of_one_name_are_an_error(bring, tmp_path):
    bring("method", "mine", METHOD, package="one")
    assert methods.names()[-1] == "mine"
    with pytest.raises(ConfigError, match=r"two methods are called mine: one_method of one and mine.py; rename one"):
        add(tmp_path)
    outside.forget_files()
    bring("method", "mine", METHOD, package="two")
    with pytest.raises(ConfigError, match="two methods are called mine: "):
        methods.get("mine")


def test_a_package_may_not_take_a_name_of_ours(bring):
    bring("kernel", "math", KERNEL, package="taken")
    with pytest.raises(ConfigError, match="math is a kernel of sp_bench; rename yours"):
        kernels.names()
    assert kernels.get("math").CUDA_KERNELS is None  # ours, whatever is installed


def test_identity_is_of_the_code_and_of_no_path(tmp_path, make_config):
    def known_as(folder: Path, text: str) -> tuple[str, str, str | None]:
        outside.forget_files()
        config = replace(make_config(), method=MethodConfig(add(folder, text)))
        return plan.cell_id(config), identity.env_id(config), identity.method_source("mine")

    first = known_as(tmp_path / "a", METHOD)
    assert known_as(tmp_path / "b", f'"""Words."""\n# and more\n{METHOD}') == first
    cell, env_id, source = known_as(tmp_path / "c", METHOD.replace("my_lab", "my_lab 2"))
    assert cell == first[0]
    assert env_id != first[1]
    assert source != first[2]
    assert known_as(tmp_path / "d", "this is no Python")[2] not in (first[2], source)


@pytest.mark.parametrize(
    ("module", "hashed"),
    [
        ("lab_alone", ["lab_alone.py"]),
        ("lab.attention", ["__init__.py", "attention.py", "deep/__init__.py", "deep/mine.py"]),
        ("lab.deep.mine", ["__init__.py", "attention.py", "deep/__init__.py", "deep/mine.py"]),
        ("lab.deep", ["__init__.py", "attention.py", "deep/__init__.py", "deep/mine.py"]),
        ("lab_that_is_not_there", []),
    ],
)
def test_the_source_of_a_package_is_all_its_files_and_that_of_a_module_its_own(tmp_path, monkeypatch, module, hashed):
    for name in ("lab_alone.py", "lab/__init__.py", "lab/attention.py", "lab/deep/__init__.py", "lab/deep/mine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "lab"]:
        del sys.modules[name]
    source = Source("method", "mine", module, entry=EntryPoint("mine", module, "sp_bench.methods"))
    assert [place.as_posix() for place, _ in source.files()] == hashed


def test_options_of_its_own_change_the_cell_and_nobody_else_s(make_config):
    plain, own = make_config(method="ring"), make_config(method="ring", method__own={"rounds": 2})
    assert plan.cell_id(plain) != plan.cell_id(own)
    assert "own" not in plan.canonical(plain)


def test_the_report_tells_options_of_its_own_apart_in_one_figure():
    configs = [{"method": {"name": "mine", "own": {"fused": fused}}} for fused in (True, False)]
    names = name_cells(
        [
            dict.fromkeys(SCHEMA.names)
            | row(method="mine", implementation="my_lab", config=json.dumps(c), cell_id=str(i))
            | {"pool": ""}
            for i, c in enumerate(configs)
        ]
    )
    assert [name.series for name in names] == [
        "mine contiguous (my_lab) fused=True",
        "mine contiguous (my_lab) fused=False",
    ]
    assert len({name.setting for name in names}) == 1
