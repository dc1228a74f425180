"""How an option is declared: beside the type and the default of its field."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sp_bench.config.prose import Prose

MAX_COUNT = 65_536  # heads of a model, ranks on an axis, micro-batches; messages list what divides a number of heads


@dataclass(frozen=True)
class Declared:
    """An option beside the type and default of its field. The fields from `words` on are text for people; no identity
    hashes them. Words of values are one text, in which {} stands for the value, or a text for each value, with those
    of all others under the key ""."""

    doc: Prose
    unit: Prose = ""
    column: str | None = ""  # of the row; empty: named as the field; None: the row has it in `config` only
    of: tuple[str, ...] = ()  # workloads that it means something to: null in rows of others; empty: all
    old_rows: Any = None  # null in older rows and None mean this value; new rows write it
    omitted: bool = False  # leave `old_rows` out of the identity's hash, so that older rows keep theirs
    none_means: Any = None  # what the method does where the option is None; by default `old_rows`
    protocol: bool = False  # how a cell is measured, not what it is
    words: Prose | Mapping[Any, str] = ""  # of its values, for readers; empty: name=value
    identifier: Prose | Mapping[Any, str] = ""  # of its values, in the identifier of a setting; empty: name=value
    named: Prose | bool = False  # True: each name shows a value other than `none_means`; False: if names would be equal
    head: Prose = ""  # of a table's column for it
    under_head: Prose | Mapping[Any, str] = ""  # of its values there; empty: the value
