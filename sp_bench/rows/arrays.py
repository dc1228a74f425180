"""Columns of rows as numpy has them, so that a rule is computed of all rows at once."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

Floats = NDArray[np.float64]  # [rows], nan where a row has no value
Truths = NDArray[np.bool_]  # [rows]
Places = NDArray[np.int64]
CLOSE = 1e-9  # relative: the rounding of a sum
Reduce = Callable[..., Floats]  # such as np.max: of [lists, entries] with axis=1


class Arrays:
    """A table's columns, each converted once. A struct's field is `column.field`."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.num_rows = table.num_rows
        self.numbers = lru_cache(maxsize=None)(self._numbers)
        self.objects = lru_cache(maxsize=None)(self._objects)

    def has(self, name: str) -> Truths:
        return self._table[name].is_valid().to_numpy()

    def value(self, name: str, place: int) -> Any:
        return self._table[name][place].as_py()

    def _objects(self, name: str) -> list[Any]:
        """The column as Python has it."""
        return self._table[name].to_pylist()

    def equal(self, name: str, *values: str) -> Truths:
        """Whether the row has one of these texts."""
        found = compute.call_function("is_in", [self._table[name]], compute.SetLookupOptions(pa.array(values)))
        return found.to_numpy()

    def _numbers(self, name: str) -> Floats:
        """The column, or a struct's field as `column.field`."""
        return floats(self.column(name))

    def lengths(self, name: str) -> Places:
        """Entries of each list; 0: the row has none."""
        return compute.call_function("list_value_length", [self.column(name)]).fill_null(0).to_numpy()

    def lists_with(self, name: str, text: str) -> Truths:
        """Whether the row's list of texts has this one."""
        found = np.zeros(self.num_rows, bool)
        entries = compute.call_function("equal", [self.column(name).flatten(), pa.scalar(text)]).fill_null(False)
        found[np.repeat(np.arange(self.num_rows), self.lengths(name))[entries.to_numpy(zero_copy_only=False)]] = True
        return found

    def column(self, name: str) -> pa.Array:
        name, _, field = name.partition(".")
        column = self._table[name].combine_chunks()
        return column.flatten()[column.type.get_field_index(field)] if field else column

    @cached_property
    def device_names(self) -> list[list[str] | None]:
        """A field of each row's environment, most of which no rule needs."""
        return self.column("environment.device_names").to_pylist()

    def of_lists(self, name: str, reduce: Reduce) -> Floats:
        """What `reduce` makes of each row's list of numbers; nan of none, of an empty one and of one with a null."""
        found = np.full(self.num_rows, np.nan)
        lists = self.column(name)
        numbers = floats(lists.values)
        for places, of_entries in by_length(lists):
            found[places] = reduce(numbers[of_entries], axis=1)
        return found


def alike(columns: Sequence[pa.ChunkedArray]) -> tuple[Places, Places]:
    """Groups of the rows that are equal in all columns, none of which is nested: the group of each row, and the first
    row of each group. A null equals a null."""
    return alike_codes([_codes(column.combine_chunks()) for column in columns])


def _codes(values: pa.Array) -> Places:
    return values.dictionary_encode("encode").indices.to_numpy().astype(np.int64)


def alike_codes(codes: Sequence[Places]) -> tuple[Places, Places]:
    """Like `alike`, for columns in which equal values have one number."""
    whole = np.stack(codes, axis=1)
    rows = pa.Array.from_buffers(pa.binary(whole.strides[0]), len(whole), [None, pa.py_buffer(whole)])
    groups = _codes(rows)
    firsts = np.zeros(groups.max(initial=-1) + 1, np.int64)
    firsts[groups[::-1]] = np.arange(len(groups))[::-1]
    return groups, firsts


def by_length(lists: pa.ListArray | pa.MapArray) -> Iterator[tuple[Places, Places]]:
    """The lists that have entries, in groups of one length: their places, and where among the entries of all lists
    theirs are, [lists, entries]."""
    offsets = lists.offsets.to_numpy().astype(np.int64) - lists.offsets[0].as_py()
    lengths = np.where(lists.is_valid().to_numpy(zero_copy_only=False), np.diff(offsets), 0)
    for length in np.unique(lengths[lengths > 0]).tolist():
        places = np.flatnonzero(lengths == length)
        yield places, offsets[places][:, None] + np.arange(length)


def inside(lists: pa.ListArray | pa.MapArray, entries: pa.Array) -> pa.Array:
    """Of the entries of a whole column those of this slice of it."""
    first, last = lists.offsets[0].as_py(), lists.offsets[-1].as_py()
    return entries.slice(first, last - first)


def nested_groups(lists: pa.ListArray) -> Iterator[tuple[Places, Floats]]:
    """Lists of lists of equal length, none empty, in groups of one shape: their places, and [lists, lists, entries]."""
    offsets, inner_offsets = lists.offsets.to_numpy(), lists.values.offsets.to_numpy()
    numbers = np.where(lists.is_valid().to_numpy(zero_copy_only=False), np.diff(offsets), 0)
    lengths = np.where(lists.values.is_valid().to_numpy(zero_copy_only=False), np.diff(inner_offsets), 0)
    values = floats(lists.values.values)
    for number in np.unique(numbers[numbers > 0]).tolist():
        places = np.flatnonzero(numbers == number)
        inner = offsets[places][:, None] + np.arange(number)
        shortest, longest = lengths[inner].min(axis=1), lengths[inner].max(axis=1)
        for length in np.unique(shortest[shortest > 0]).tolist():
            alike = (shortest == length) & (longest == length)
            yield places[alike], values[inner_offsets[inner[alike]][:, :, None] + np.arange(length)]


def floats(values: pa.Array) -> Floats:
    return values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def close(a: Floats, b: Floats) -> Truths:
    """Whether both are finite, and the same but for the rounding of a sum."""
    largest = np.maximum(np.abs(a), np.abs(b))
    return (np.abs(a - b) <= np.maximum(CLOSE * largest, 1e-12)) & (largest < np.inf)
