"""Rows without what could tell whose they are: hosts, users, device UUIDs, paths, addresses and commits.

It works on the selected rows, before anything is drawn or written, so that nothing later can know what is left out.
Names are learnt from the rows themselves, from the campaigns' paths and from the process that makes the report.
"""

import getpass
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from sp_bench.analysis.selection import Selection
from sp_bench.rows import store

HOST, USER, PATH, ADDRESS, COMMIT, UUID, URL = (
    f"({what} removed)" for what in ("host", "user", "path", "address", "commit", "UUID", "URL")
)
IMPERSONAL = {"root", "user", "admin", "nobody", "ubuntu", "localhost", "localhost.localdomain"}
# Kept, or with a rule of their own.
KEPT = ("trial_id", "cell_id", "env_id", "core_id", "git_sha", "config", "environment", "node_environments", "file")
EMPTIED = ("hostname", "device_uuids")  # fields of the environment
VERSIONS = ("python", "driver", "cuda", "cudnn", "nccl")  # four numbers with dots are a version there, not an address

_NAME = r"[\w.@+~%=-]"
_HOME = re.compile(rf"(?:/home|/Users)/+({_NAME}+)|[A-Za-z]:\\{{1,2}}Users\\{{1,2}}({_NAME}+)|~({_NAME}+)/")
_EMAIL = re.compile(r"([\w.+-]+)@[\w-]+(?:\.[\w-]+)+")
_LOGIN = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*")
_USER_VARIABLE = re.compile(r"USER|USERNAME|LOGNAME|\w+_USER|\w+_USER_NAME")
_HOST_VARIABLE = re.compile(r"HOST|HOSTNAME|MASTER_ADDR|\w+_HOST|\w+_HOSTNAME|\w*NODENAME|\w*NODE_?LIST|\w+_NODE")
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+"), URL),
    # A quoted path may hold blanks.
    (re.compile(r"(?<=')(?:~[\w.-]*)?/[^'\n]+(?=')|(?<=\")(?:~[\w.-]*)?/[^\"\n]+(?=\")"), PATH),
    (re.compile(rf"(?:[A-Za-z]:\\|\\\\){_NAME}+(?:\\+{_NAME}+)*"), PATH),
    (re.compile(rf"~[\w.-]*/{_NAME}+(?:/+{_NAME}+)*/?"), PATH),
    # Not the bar of a unit or of a pair of words, which follows one; but that of a compiler's -I or -L does, too.
    (re.compile(rf"(?:(?<![\w/.~)\]])|(?<=-[ILBF]))/+(?:{_NAME}+/+)+{_NAME}*"), PATH),
    (re.compile(rf"(?:(?<![\w/.~)\]])|(?<=-[ILBF]))/{_NAME}{{2,}}"), PATH),
    (re.compile(r"(?:/home|/Users|/root|/scratch|/lustre|/mnt|/data|/tmp)/[^\s'\":,;]+"), PATH),
    (_LOGIN, ADDRESS),
    (re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), UUID),
    (re.compile(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5,}\b"), ADDRESS),  # a network card's or an InfiniBand port's
    (re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\d)"), ADDRESS),
    (re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:local|internal|lan|cluster|corp|edu|gov|com|net|org|io)\b"), HOST),
    (re.compile(r"\b[0-9a-f]{40}\b"), COMMIT),
)  # fmt: skip
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?:%\w+)?(?![\w:])")


def anonymous(selection: Selection, folders: Sequence[Path]) -> Selection:
    """The selection with every text cleaned; `folders` are the campaigns that it was read from.

    Campaigns stay apart: a folder's name keeps all but what could tell a person or a machine.
    """
    rows = selection.rows
    clean = _cleaner(rows, folders)
    cleaned = rows.copy()
    for column in rows.columns.difference(KEPT):
        if rows[column].dtype == object or isinstance(rows[column].dtype, pd.StringDtype):
            cleaned[column] = [_cleaned(value, clean) for value in rows[column]]
    cleaned["git_sha"] = None
    cleaned["config"] = [_cleaned_config(value, clean) for value in rows["config"]]
    cleaned["environment"] = [_cleaned_environment(value, clean) for value in rows["environment"]]
    if "node_environments" in rows:
        cleaned["node_environments"] = [
            [_cleaned_environment(each, clean) for each in nodes] if isinstance(nodes, Iterable) else nodes
            for nodes in rows["node_environments"]
        ]
    names = _distinct({str(name): clean(str(name)) for name in sorted(set(rows["folder"]))})
    cleaned["folder"] = [names[str(name)] for name in rows["folder"]]
    identity = rows[["trial_id", "env_id", "attempt", "status"]].itertuples(index=False)
    files = (store.RowName(*each).file_name for each in identity)
    cleaned["file"] = [f"{folder}/{file}" for folder, file in zip(cleaned["folder"], files, strict=True)]
    return replace(selection, rows=cleaned, problems=tuple(map(clean, selection.problems)))


def _cleaner(rows: pd.DataFrame, folders: Sequence[Path]) -> Callable[[str], str]:
    """Takes out of a text whatever the patterns say, and the names of hosts, users and commits that were found."""
    users, hosts = {_process_user()}, {socket.gethostname()}
    texts = [str(folder.resolve()) for folder in folders]
    for environment in _environments(rows):
        if not isinstance(environment, Mapping):
            continue
        hosts.add(str(environment.get("hostname") or ""))
        for name, value in _pairs(environment.get("env")):
            texts.append(str(value))
            users |= {str(value)} if _USER_VARIABLE.fullmatch(str(name)) else set()
            hosts |= {str(value)} if _HOST_VARIABLE.fullmatch(str(name)) else set()
    for column in ("reason", "config"):
        texts += [text for text in rows[column].unique() if isinstance(text, str)]
    for text in dict.fromkeys(texts):
        users |= {name for match in _HOME.finditer(text) for name in match.groups() if name}
        users |= {match[1] for match in _EMAIL.finditer(text)}
    hosts |= {host.partition(".")[0] for host in hosts}
    commits = {sha for text in rows["git_sha"].dropna().unique() for sha in re.findall("[0-9a-f]{40}", text)}
    named = [(_whole_words(hosts), HOST), (_whole_words(users), USER), (_prefixes(commits), COMMIT)]
    replaced = [*_PATTERNS, *((pattern, word) for pattern, word in named if pattern is not None)]

    @cache
    def clean(text: str) -> str:
        for pattern, word in replaced:
            text = pattern.sub(word, text)
        return _IPV6.sub(lambda match: ADDRESS if _is_address(match[0]) else match[0], text)

    return clean


def _environments(rows: pd.DataFrame) -> Iterator[Any]:
    """Those of the rows, and of all hosts of trials over several."""
    yield from rows["environment"]
    columns = [name for name in ("node_environments",) if name in rows]
    for nodes in (each for name in columns for each in rows[name]):
        if isinstance(nodes, Iterable):
            yield from nodes


def _process_user() -> str:
    """Empty where the process's user has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _whole_words(names: Iterable[str]) -> re.Pattern[str] | None:
    """Any of the names, whatever its case; None of nothing. An underscore ends a word, as in a file's name."""
    known = sorted({name for name in names if name} - IMPERSONAL, key=lambda name: (-len(name), name))
    if not known:
        return None
    return re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, known))})(?![A-Za-z0-9])", re.IGNORECASE)


def _prefixes(commits: Iterable[str]) -> re.Pattern[str] | None:
    """A commit's hash in full or abbreviated to 7 digits or more."""
    each = [f"{sha[:7]}(?:{'(?:'.join(sha[7:])}{')?' * len(sha[7:])}" for sha in sorted(commits) if len(sha) > 7]
    return re.compile(rf"\b(?:{'|'.join(each)})\b") if each else None


def _is_address(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    """Texts at any depth of what a column holds."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): _cleaned(each, clean) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_cleaned(each, clean) for each in value)
    if isinstance(value, Iterable):
        return [_cleaned(each, clean) for each in value]
    return value


def _cleaned_config(text: Any, clean: Callable[[str], str]) -> Any:
    """Decoded first: JSON escapes hide what a pattern looks for."""
    if not isinstance(text, str):
        return text
    try:
        return json.dumps(_cleaned(json.loads(text), clean), sort_keys=True, separators=(",", ":"))
    except ValueError:
        return clean(text)
    except RecursionError:  # too deep to be looked through
        return None


def _cleaned_environment(value: Any, clean: Callable[[str], str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    kept = {name: each if name in VERSIONS else _cleaned(each, clean) for name, each in value.items()}
    kept["packages"] = [(name, version) for name, version in _pairs(value.get("packages"))]
    return kept | dict.fromkeys(EMPTIED)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """A map column, as pandas gives it."""
    return [] if value is None else [(name, each) for name, each in value]


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Values made different by a number where two are equal."""
    taken: set[str] = set()
    made = {}
    for name, shown in names.items():
        made[name] = next(s for s in (shown, *(f"{shown} {i}" for i in range(2, len(names) + 2))) if s not in taken)
        taken.add(made[name])
    return made
