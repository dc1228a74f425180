"""A table as CSV, one line an entry, with the trial ids behind each."""

import pandas as pd

from sp_bench.report.figures.drawings import trial_ids
from sp_bench.report.tables.parts import PaperTable


def sheet(table: PaperTable) -> str:
    """Columns: the words that a line begins with, then `column`, `unit`, `value`, `best` and `trial_ids`."""
    begin = next((i for i, column in enumerate(table.columns) if column.is_number), len(table.columns))
    names = [column.name for column in table.columns[:begin]]
    records = []
    for line in table.lines:
        start = [entry.text for entry in line[:begin]]
        for column, entry in zip(table.columns[begin:], line[begin:], strict=True):
            ids = " ".join(filter(None, map(trial_ids, entry.cells)))
            records.append([*start, column.name, column.unit, entry.text, entry.best, ids])
    return pd.DataFrame(records, columns=[*names, "column", "unit", "value", "best", "trial_ids"]).to_csv(index=False)
