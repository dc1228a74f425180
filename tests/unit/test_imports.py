"""The only legal import arrows, walked over the sources, and proven in fresh processes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sp_bench
from sp_bench import hardware

PACKAGE = Path(sp_bench.__file__).parent
OPTIONAL = {"deepspeed", "flash_attn", "ring_flash_attn", "yunchang", "transformers", "transformer_engine"}
DRIVER = {
    *("plan", "conf_files", "overrides", "sweep", "attempt", "campaign", "campaign_config", "trial", "outcome", "logs"),
    *("labels", "progress", "cli", "doctor", "claims", "owner", "orphans", "machine", "interrupts", "storage"),
    *("support", "support_table"),
}
NO_TORCH = (
    *("config", "dotted", "costs", "patterns", "layouts", "messages", "hardware", "results", "handover", "model_costs"),
    "doubts",
    "compiled_code",
    *("schema", "containment", "parsing", "fail_points", "engines/__init__", "engines/support", *sorted(DRIVER)),
)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names of all that the file imports; those under TYPE_CHECKING or, if asked, in functions left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if top_level_only and isinstance(node, ast.FunctionDef):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def ours(names: set[str]) -> set[str]:
    """Modules of sp_bench, by their name inside the package: `methods`, `launchers`, ..."""
    return {name.split(".")[1] for name in names if name.startswith("sp_bench.")}


@pytest.mark.parametrize("name", NO_TORCH)
def test_the_driver_and_the_pure_modules_import_no_torch_anywhere(name):
    assert not roots(imports(PACKAGE / f"{name}.py")) & {"torch", *OPTIONAL}


@pytest.mark.parametrize("package", ["methods", "kernels"])
def test_methods_and_kernels_import_torch_only_inside_functions(package):
    for path in (PACKAGE / package).glob("*.py"):
        assert "torch" not in roots(imports(path, top_level_only=True)), path.name


def test_methods_never_import_each_other():
    names = {path.stem for path in (PACKAGE / "methods").glob("*.py")} - {"__init__"}
    for path in (PACKAGE / "methods").glob("*.py"):
        used = {n.split(".")[2] for n in imports(path) if n.startswith("sp_bench.methods.")}
        assert not used & names, path.name


def test_nothing_but_the_driver_imports_the_driver():
    for path in sources():
        name = name_of(path)
        if name.split("/")[0] in DRIVER | {"launchers", "report", "__main__"}:
            continue
        assert not ours(imports(path)) & (DRIVER | {"launchers", "report"}), name


def test_measuring_code_is_what_a_rank_can_import():
    """No more, or a word in a label would have committed rows measured again; methods and such are chosen by name."""
    by_name = [
        path for package in ("methods", "kernels", "workloads", "engines") for path in (PACKAGE / package).glob("*")
    ]
    left, reached = [PACKAGE / "worker.py", *(path for path in by_name if path.suffix == ".py")], set()
    while left:
        path = left.pop()
        if path.is_file() and path not in reached:
            reached |= {path, path.parent / "__init__.py"}
            parts = [name.split(".")[1:] for name in imports(path) if name.startswith("sp_bench")]
            left += [
                file
                for each in parts
                for file in (PACKAGE.joinpath(*each).with_suffix(".py"), PACKAGE.joinpath(*each, "__init__.py"))
            ]
    assert reached == set(hardware.measuring_sources())


def test_the_driver_knows_the_worker_by_its_module_name_only():
    for path in sources():
        if name_of(path) != "worker":
            assert "worker" not in ours(imports(path)), name_of(path)


def test_reports_read_nothing_but_rows_and_costs():
    for path in (PACKAGE / "report").rglob("*.py"):
        known = ours(imports(path)) - {"report"}
        allowed = {"results", "dotted", "costs", "patterns", "layouts", "config", "model_costs", "hardware", "doubts"}
        assert known <= allowed, (path.name, known)


def test_hydra_is_imported_by_the_driver_only():
    users = {name_of(path) for path in sources() if "hydra" in roots(imports(path))}
    assert users <= {"overrides", "sweep", "cli"}


def test_optional_libraries_are_imported_inside_functions_only():
    for path in sources():
        assert not roots(imports(path, top_level_only=True)) & OPTIONAL, name_of(path)


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import sp_bench.plan, sp_bench.costs, sp_bench.results", {"torch", "hydra", "matplotlib"}),
        ("import sp_bench.cli, sp_bench.doctor, sp_bench.campaign, sp_bench.launchers.local", {"torch", "matplotlib"}),
        ("import sp_bench.report", {"torch", "hydra"}),
        ("import sp_bench.worker", {"hydra", "omegaconf", "typer", "rich"}),
        ("import hydra_plugins.sp_bench_plugins", {"torch"}),
    ],
)
def test_importing_pulls_in_no_more_than_it_should(statement, absent):
    code = f"{statement}\nimport sys\nprint(*sorted({absent | OPTIONAL!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
