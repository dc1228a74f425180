"""Rows without what could identify their authors: hosts, users, device UUIDs, paths, addresses and commits.

No pattern is searched for. Columns of text that a person or machine chose are dropped. A name that this package does
not have becomes a number. All later stages see only the result.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pyarrow as pa

from sp_bench.analysis import words
from sp_bench.analysis.cells import listed
from sp_bench.analysis.selection import Selection
from sp_bench.config.engine import FACTS
from sp_bench.config.options import BY_COLUMN, BY_PATH
from sp_bench.config.trial import TrialConfig
from sp_bench.formats import counted
from sp_bench.hardware import OF_PUBLIC_VALUES, PACKAGES
from sp_bench.rows import store
from sp_bench.rows.names import OWN_CODE, cell_id, config_leaves, trial_id
from sp_bench.rows.schema import PARAMETER_ERRORS, SCHEMA

LEFT_OUT = "(left out)"
FREE = ("git_sha", "git_dirty", "campaign", "launched_kernels", "kernel_launches", "trace_files", "digest")  # left out
LIBRARIES = ("implementation", "engine_implementation")  # name==version, one or several
ENVIRONMENT = ("python", "cpu_cores", "device_names", "driver", "cuda", "cudnn", "nccl", "process_group")  # kept
OOM_SITES = ("torch", "nccl", "host")
DEVICES = ("a100", "b200", "cpu", "h100", "h200")  # of conf/hardware
# Of conf/model and conf/link, beside those that options name
OTHERS = ("llama2_7b", "nodes_200g", "nodes_400g", "nodes_400g_short")
PRIMITIVES = ("all_gather", "all_to_all", "send_recv", "none")
# Of a link: `all_gather 8`, and bytes:microseconds as `0:60 1000000000:42165`
LINK_OP = re.compile(r"(all_gather|all_to_all|reduce_scatter|send) \d+")
LINK_TIMES = re.compile(r"\d+:\d+(\.\d+)?( \d+:\d+(\.\d+)?)*")


PROOF = re.compile(r"(_proofs/)?[0-9a-f]+(-[0-9a-f]+)+(\.json)?")  # beside its campaign: of ids


def anonymous(selection: Selection) -> Selection:
    """The selection without free text. Each campaign, and each name from outside, gets a number of its own."""
    rows = selection.rows.copy()
    name, campaign = _Numbered("name", _known_words()), _Numbered("campaign")
    for column in {*FREE} & {*rows.columns}:
        rows[column] = None
    rows["reason"] = [LEFT_OUT if isinstance(value, str) else None for value in rows["reason"]]
    rows["oom_site"] = [value if value in OOM_SITES else None for value in rows["oom_site"]]
    rows["flags"] = [[flag for flag in listed(value) if flag in words.FLAGS] for value in rows["flags"]]
    for column in [each for each in BY_COLUMN if pa.types.is_string(SCHEMA.field(each).type)]:
        rows[column] = [name(value) if isinstance(value, str) else value for value in rows[column]]
    for column in LIBRARIES:
        rows[column] = [_libraries(value, name) if isinstance(value, str) else value for value in rows[column]]
    for column in PARAMETER_ERRORS:
        rows[column] = [value | {"parameter": None} if isinstance(value, dict) else value for value in rows[column]]
    rows["primitive"] = [
        "+".join(map(name, value.split("+"))) if isinstance(value, str) else value for value in rows["primitive"]
    ]
    configs, rows["config"] = list(rows["config"]), [_config(value, name) for value in rows["config"]]
    # An id that is the hash of a config confirms a guess of what is hidden there. So it becomes that of the hidden one.
    for at, before, after in zip(rows.index, configs, rows["config"], strict=True):
        if after != before and isinstance(after, str) and rows.at[at, "cell_id"] == cell_id(before):
            rows.at[at, "cell_id"] = cell = cell_id(after)
            rows.at[at, "trial_id"] = trial_id(cell, rows.at[at, "replicate"])
    rows["environment"] = [_environment(value) for value in rows["environment"]]
    rows["node_environments"] = [
        [_environment(each) for each in nodes] if isinstance(nodes, Iterable) else None
        for nodes in rows["node_environments"]
    ]
    rows["folder"] = folders = [campaign(str(value)) for value in rows["folder"]]
    rows["proof"] = [_proof(value, campaign) if isinstance(value, str) else None for value in rows["proof"]]
    identity = rows[["trial_id", "env_id", "attempt", "status"]].itertuples(index=False)
    files = (store.RowName(*each).file_name for each in identity)
    rows["file"] = [f"{folder}/{file}" for folder, file in zip(rows["folder"], files, strict=True)]
    problems = (counted(len(selection.problems), "problem"),) if selection.problems else ()
    campaigns = dict(zip(selection.rows["folder"], folders, strict=True))
    return replace(selection, rows=rows, problems=problems, campaigns=campaigns)


class _Numbered:
    """Keeps known texts and replaces others by `name 1`, `name 2`."""

    def __init__(self, noun: str, known: Iterable[str] = ()) -> None:
        self._noun, self._known, self._found = noun, frozenset(known), dict[str, str]()

    def __call__(self, text: str) -> str:
        if self.knows(text):
            return text
        return self._found.setdefault(text, f"{self._noun} {len(self._found) + 1}")

    def knows(self, text: str) -> bool:
        is_numbers = text.replace(",", "").isdecimal()  # lengths of documents
        is_ours = any(each.fullmatch(text) for each in (OF_PUBLIC_VALUES, LINK_OP, LINK_TIMES))
        return text in self._known or is_numbers or is_ours


def _known_words() -> set[str]:
    """The names of this package and the choices of its options."""
    named = [map(str, option.words) for option in BY_PATH.values() if isinstance(option.words, Mapping)]
    known = {*PACKAGES, *DEVICES, *FACTS, *OTHERS, *PRIMITIVES, OWN_CODE, *_choices(TrialConfig), *BY_PATH}
    return known.union(*named, *(path.split(".") for path in BY_PATH))


def _choices(kind: Any) -> set[str]:
    """The texts of each Literal in a type, and in the fields of a dataclass."""
    if is_dataclass(kind):
        return {text for hint in get_type_hints(kind).values() for text in _choices(hint)}
    if get_origin(kind) is Literal:
        return {text for text in get_args(kind) if isinstance(text, str)}
    return {text for each in get_args(kind) for text in _choices(each)}


def _libraries(text: str, name: _Numbered) -> str:
    """name==version of the libraries that this package records; other names become numbers."""
    parts = [part.partition("==") for part in text.split()]
    return " ".join(f"{library}{sep}{_public(version)}" if library in (*PACKAGES, OWN_CODE) else name(library)
                    for library, sep, version in parts)  # fmt: skip


def _public(version: str) -> str:
    """Without the local part, which may be a commit: 2.8.1 of 2.8.1+g0123abc."""
    return version.partition("+")[0]


def _proof(text: str, campaign: _Numbered) -> str | None:
    """campaign 1/_proofs/..., of ids alone; None if it has anything else."""
    folder, slash, rest = text.partition("/")
    return campaign(folder) + slash + rest if PROOF.fullmatch(rest) else None


def _config(text: Any, name: _Numbered) -> str | None:
    """The config as it is if all its names are known, since ids are its hash; else by dotted names. None if it is
    missing or unreadable."""
    leaves = config_leaves(text)
    known = {
        ".".join(map(name, path.split("."))): name(value) if isinstance(value, str) else value
        for path, value in leaves.items()
    }
    if known and known == leaves and text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")):
        return text  # nothing hides in it, as a key that stands twice
    return json.dumps(known, sort_keys=True) if known else None


def _environment(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return None
    packages = [(name, _public(str(version))) for name, version in listed(value.get("packages")) if name in PACKAGES]
    kept = {name: value.get(name) for name in ENVIRONMENT}
    return dict.fromkeys(value) | kept | {"packages": packages}
