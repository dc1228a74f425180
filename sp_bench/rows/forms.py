"""The form of a row: what it has in common with rows that differ in what was measured. Rules that read no more are
asked once a form, as replicates share theirs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import compute

from sp_bench.config.options import OPTIONS
from sp_bench.config.parsing import shown
from sp_bench.config.trial import has_times
from sp_bench.config.workload import AUTO, COMPARED
from sp_bench.rows.arrays import alike
from sp_bench.rows.names import cell_id, config_leaves
from sp_bench.rows.schema import COLUMNS, SCHEMA_VERSION, Column

_REQUIRED = tuple(column for column in COLUMNS if column.required and column.name != "environment")  # not a result
# Options that no trial lacks: all that a table says of a cell begins with them.
_OF_ALL = ("method", "workload", "pass_kind", "dtype", "sp_size", "dp_replicate_size", "dp_shard_size")
_OF_LENGTHS = ("kernel", "model", "causal", "batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim")
_PER = tuple((column.name, column.per) for column in COLUMNS if column.per)
_OF_CONFIG = {option.path: option.column for option in OPTIONS if option.column}
# All values that the rules of a row's form read.
_OF_FORM = ("config", "schema_version", "status", "workload", "pass_kind", "evidence", "world_size", "timed_steps")
_OF_FORM = tuple(dict.fromkeys([*_OF_FORM, *_OF_ALL, *_OF_LENGTHS, *_OF_CONFIG.values()]))


class _Config:
    """What a config, given by dotted name, asks for. Replicates share theirs."""

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        given = ((path, value) for path, value in leaves.items() if path in _OF_CONFIG)
        # auto: the column has what came of it
        self.asked = [(path, _OF_CONFIG[path], value) for path, value in given if value not in (None, AUTO)]
        self.fits = bool(leaves.get("workload.fit"))
        self.is_timed = has_times(self.fits, leaves.get("hardware.ranks_per_gpu") or 1)
        self.timed_steps, self.warmup_steps = leaves.get("workload.timed_steps"), leaves.get("workload.warmup_steps", 0)


class Form:
    """What rows have in common that differ in what was measured: the options, which columns they lack and how long
    their lists are. All rows of a form keep the rules that read no more, or none does."""

    def __init__(
        self,
        values: Mapping[str, Any],
        config: _Config,
        lengths: Mapping[str, int | None],
        absent: Mapping[str, bool],
        required: Sequence[Column],
    ) -> None:
        self._values = values
        self.config = config
        self.lengths = lengths
        self.absent = absent
        self.required = required  # other columns have a value in all rows
        self.cell_id = None if values["config"] is None else cell_id(values["config"])
        self.breach = first_of(_breaches_of_form(self))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    @property
    def one_rank(self) -> bool:
        return self["evidence"] == "one_rank"


def forms(table: pa.Table) -> list[Form]:
    """The form of each row."""
    configs = {text: _Config(config_leaves(text)) for text in table["config"].unique().to_pylist()}
    lists = [name for name, _ in _PER if table[name].null_count < table.num_rows]
    required = [column for column in _REQUIRED if table[column.name].null_count]
    columns = [table[name] for name in _OF_FORM]
    columns += [compute.call_function("list_value_length", [table[name]]) for name in lists]
    columns += [table[column.name].is_null() for column in required]

    def form(key: tuple[Any, ...]) -> Form:
        values, entries = dict(zip(_OF_FORM, key, strict=False)), iter(key[len(_OF_FORM) :])
        lengths = dict(zip(lists, entries, strict=False))
        absent = {column.name: next(entries) for column in required}
        return Form(values, configs[values["config"]], lengths, absent, required)

    groups, firsts = alike(columns)
    known = [form(key) for key in zip(*(column.take(firsts).to_pylist() for column in columns), strict=True)]
    return [known[group] for group in groups.tolist()]


def first_of(breaches: Iterator[str]) -> str | None:
    try:
        return next(breaches, None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"its columns do not fit each other ({shown(f'{type(error).__name__}: {error}')})"


def _breaches_of_form(form: Form) -> Iterator[str]:
    version = form["schema_version"]
    if version is None or not 1 <= version <= SCHEMA_VERSION:
        yield f"schema_version={version}; this version of sp_bench reads 1 to {SCHEMA_VERSION}"
    yield from _config(form)
    if form["status"] == "ok":
        yield from _options(form)
        yield from _required(form)
        yield from _lengths(form)


def _config(form: Form) -> Iterator[str]:
    for path, column, asked in form.config.asked:
        if form[column] not in (None, asked):
            yield f"{column}={shown(form[column])}; its config has {path}={shown(asked)}"


def _options(form: Form) -> Iterator[str]:
    for name in _OF_ALL if form["workload"] == "collective" else _OF_ALL + _OF_LENGTHS:
        value = form[name]
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value < 1):
            yield f"{name}={value} of an ok row"


def _required(form: Form) -> Iterator[str]:
    """What a record must have, proofs among it. Arms and proofs of packed documents are not judged here: whether a
    trial has them is up to the code of its method and engine."""
    trials = {"any", form["workload"], form["pass_kind"]}
    excused = {"fits"} if form.config.fits else set()
    excused |= {"one_rank"} if form.one_rank else set()
    for column in form.required:
        if (
            form["schema_version"] >= column.since
            and not trials.isdisjoint(column.required)
            and excused.isdisjoint(column.unless)
            and (form.config.is_timed or not column.is_time)
            and form.absent[column.name]
        ):
            yield f"{column.name}=null of an ok row"


def _lengths(form: Form) -> Iterator[str]:
    """Lists by rank and by step have an entry for each."""
    steps = form.config.timed_steps
    if steps == AUTO:
        steps = form["timed_steps"]
    if steps is not None and form["workload"] in COMPARED:
        steps += form.config.warmup_steps
    wanted = {"rank": 1 if form.one_rank else form["world_size"], "step": steps}
    for name, per in _PER:
        found, length = form.lengths.get(name), wanted[per]
        if None not in (found, length) and found != length:
            yield f"{name} has {found} entries; expected {length}, one for each {per}"
