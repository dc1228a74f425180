"""Columns are read by name: a misspelt one is found here, whether or not any row of a test comes by."""

import ast
from pathlib import Path

import sp_bench
from sp_bench.analysis.selection import COLUMNS

OF_SELECTION = {"folder", "file", "pool", "device_set"}
ROWS = {"row", "rows", "asked", "r"}  # what a row, the rows or what was asked for are called


def test_every_column_that_the_report_reads_is_read_from_the_rows() -> None:
    read = set()
    package = Path(sp_bench.__file__).parent
    for path in (path for room in ("analysis", "report", "predict") for path in (package / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                value = node.value
                name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", None)
                if name in ROWS and isinstance(node.slice.value, str):
                    read.add(node.slice.value)
    assert len(read) > 60
    assert read - {"curve"} <= {*COLUMNS, *OF_SELECTION}  # report/link_file.py reads the curves of `collective` itself
