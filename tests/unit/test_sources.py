"""What no source may do: run what it reads. Rows are parquet, configs are safe YAML, records are JSON."""

import ast
import re
from pathlib import Path

import pytest

import sp_bench

EXECUTES = re.compile(
    r"\b(pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal|hickle)\b|torch\.(load|save)\b|allow_pickle|read_pickle|"
    r"to_pickle|yaml\.(load|unsafe_load|full_load|UnsafeLoader|Loader|FullLoader)\b|shell=True|os\.system|\beval\(|\bexec\("
)


def code_of(path: Path) -> str:
    """The file without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.unparse(tree)


def test_no_source_reads_or_writes_what_executes_when_read():
    package = Path(sp_bench.__file__).parent
    sources = list(package.rglob("*.py"))
    assert len(sources) > 50
    found = {path.name: match[0] for path in sources if (match := EXECUTES.search(code_of(path)))}
    assert found == {}


@pytest.mark.parametrize("line", ["import pickle", "torch.load(f)", "np.load(f, allow_pickle=True)", "yaml.load(f)"])
def test_the_search_finds_what_it_looks_for(line):
    assert EXECUTES.search(line)
