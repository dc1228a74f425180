"""The only legal import arrows between the package's folders, walked over the sources and proven in fresh processes."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sp_bench
from sp_bench import methods

PACKAGE = Path(sp_bench.__file__).parent
OPTIONAL = {"deepspeed", "flash_attn", "ring_flash_attn", "yunchang", "transformers", "transformer_engine"}

# From the top floor down: each may import what stands below it, but for the rooms in READS.
FLOORS = (
    *("__main__", "cli", "api", "report", "predict", "analysis", "look", "cluster", "driver", "planning"),
    *("worker", "workloads"),
    *(
        "oracle",
        "engines",
        "training",
        "methods",
        "attention",
        "measure",
        "rows",
        "testing",
        "costs",
        "kernels",
        "handover",
        "formats",
        "hardware",
        "programs",
        "config",
    ),
)
READS = {"rows", "costs", "config", "hardware", "formats"}
PLANNING_USES = {*READS, "methods", "kernels", "engines"}
DRIVER_USES = {*PLANNING_USES, "planning", "programs", "handover", "testing", "attention"}
MAY_IMPORT = {  # a room that runs no rank -> the rooms it may import
    "report": READS | {"analysis"},
    "predict": READS | {"analysis"},
    "analysis": READS,
    "look": DRIVER_USES | {"driver", "cluster"},
    "cluster": DRIVER_USES | {"driver"},
    "driver": DRIVER_USES,
    "planning": PLANNING_USES,
}
NO_TORCH = (
    *MAY_IMPORT,
    "cli",
    "api",
    "rows",
    "costs",
    "config",
    "handover",
    "formats",
    "hardware",
    "programs",
    "testing",
    "__init__",
)
NO_TORCH_AT_IMPORT = ("methods", "kernels")  # the driver asks them what they support


def sources(floor: str = "") -> list[Path]:
    """The files of one floor - a folder, or a file at the package's root - or of all."""
    found = sorted(path for path in PACKAGE.rglob("*.py") if not floor or floor_of(path) == floor)
    assert found, floor
    return found


def floor_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def arrows() -> Iterator[tuple[Path, str, str]]:
    """(file, its floor, another floor that it imports)."""
    for path in sources():
        for name in sorted(imports(path)):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if package == "sp_bench" and other in FLOORS and other != floor_of(path):
                yield path, floor_of(path), other


def test_every_folder_is_a_floor():
    assert {floor_of(path) for path in sources()} - {"__init__"} == set(FLOORS)


def test_imports_go_down_the_floors():
    for path, floor, other in arrows():
        assert FLOORS.index(other) > FLOORS.index(floor), f"{path.name} of {floor} imports {other}"


def test_rooms_without_ranks_import_only_what_they_may():
    for path, floor, other in arrows():
        assert floor not in MAY_IMPORT or other in MAY_IMPORT[floor], f"{path.name} of {floor} imports {other}"


def test_analysis_draws_and_writes_nothing():
    for path in sources("analysis"):
        assert not roots(imports(path)) & {"matplotlib", "jinja2", "markupsafe"}, path


def test_a_rank_imports_no_room_without_ranks():
    above = ("__main__", "cli", "api", *MAY_IMPORT)
    assert not [path for path, floor, other in arrows() if other in MAY_IMPORT and floor not in above]


def test_the_worker_is_known_by_its_module_name_only():
    assert not [path for path, _, other in arrows() if other == "worker"]


@pytest.mark.parametrize("floor", NO_TORCH)
def test_what_the_driver_is_made_of_imports_no_torch_anywhere(floor):
    for path in sources(floor):
        if path.name != "faults.py":  # which strike a rank
            assert not roots(imports(path)) & {"torch", *OPTIONAL}, path


@pytest.mark.parametrize("floor", NO_TORCH_AT_IMPORT)
def test_what_a_plan_asks_imports_torch_only_inside_functions(floor):
    for path in sources(floor):
        assert "torch" not in roots(imports(path, top_level_only=True)), path


def test_methods_never_import_each_other():
    for path in sources("methods"):
        used = {name.split(".")[2] for name in imports(path) if name.startswith("sp_bench.methods.")}
        assert not used & set(methods.NAMES), path.name


def test_hydra_is_imported_where_trials_are_planned_only():
    users = {floor_of(path) for path in sources() if "hydra" in roots(imports(path))}
    assert users <= {"planning", "cluster", "cli"}


def test_optional_libraries_are_imported_inside_functions_only():
    for path in sources():
        assert not roots(imports(path, top_level_only=True)) & OPTIONAL, path


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            "import sp_bench.planning.plan, sp_bench.costs.attention, sp_bench.rows.store",
            {"torch", "hydra", "matplotlib"},
        ),
        ("import sp_bench.cli, sp_bench.look.doctor, sp_bench.driver.campaign", {"torch", "matplotlib"}),
        ("import sp_bench.report", {"torch", "hydra"}),
        ("import sp_bench", {"torch", "pandas", "pyarrow", "numpy"}),
        ("import sp_bench; sp_bench.load('results/h200_kernels')", {"torch", "hydra", "matplotlib"}),
        ("import sp_bench.worker", {"hydra", "omegaconf", "typer", "rich"}),
    ],
)
def test_importing_pulls_in_no_more_than_it_should(statement, absent):
    code = f"{statement}\nimport sys\nprint(*sorted({absent | OPTIONAL!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
