"""What no row of a campaign has: `_campaign.yaml` in its folder. People write it, and runs append to `commands`.

    machine: what the rows do not know of it, such as "in a product of matrices by hand the second GPU was slow"
    commit: the measured code, where the rows do not name it
    differs: what differs from the sweep of that name
    remarks: anything else, as Markdown
    superseded_by: the campaign that took its place
    commands:
    - at: 2026-01-31T12:00:00Z
      commit: as in the column git_sha
      words: sp-bench run sweep=smoke

Every key may be absent. Commands name an unreadable file and go on without it.
"""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from sp_bench.config.parsing import ConfigError, nearest, shown
from sp_bench.config.yaml_text import read_yaml
from sp_bench.rows import plain_file
from sp_bench.rows.store import WORK

NAME = "_campaign.yaml"  # readers of rows skip names that begin with _
MAX_BYTES = 2**18  # the longest of ours has 5 kB
TIME = "%Y-%m-%dT%H:%M:%SZ"
HEADER = (
    "# What no row of this campaign says. Write machine, commit, differs, remarks and superseded_by above `commands`:\n"
    "# runs append to that list.\n"
)
_DROPPED = ("results_root=", "resume=", "plan_only=")  # where results lie is no part of what was measured
_PATH = re.compile(r"(?:^|(?<=[=,:'\"\[{(\s]))[~/][^,'\"\]})]*")


@dataclass(frozen=True)
class Command:
    """A command that had something to run. Empty: not known."""

    words: str = ""
    at: str = ""  # UTC, ISO 8601
    commit: str = ""  # as in the column `git_sha`


@dataclass(frozen=True)
class CampaignFile:
    """The fields are the keys of the file; one that the file lacks is empty."""

    machine: str = ""
    commit: str = ""
    differs: str = ""
    remarks: str = ""
    superseded_by: str = ""
    commands: tuple[Command, ...] = ()

    def texts(self) -> list[tuple[str, str]]:
        """(key, text) of every key that the file has; a command's time and commit follow its words."""
        found = [(field.name.replace("_", " "), getattr(self, field.name)) for field in fields(self)[:-1]]
        for each in self.commands:
            when = ", ".join(filter(None, [each.at, each.commit]))
            found.append(("command", f"{each.words} ({when})" if when else each.words))
        return [(key, value) for key, value in found if value]


def read(folder: Path) -> CampaignFile:
    """The content of a campaign's file; empty without a file.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key or a value that is no text.
    """
    return _parsed(text(folder), folder)


def text(folder: Path) -> str:
    """The text of a campaign's file; empty without a file.

    Raises:
        ConfigError: it is no plain file, too large, or no UTF-8.
    """
    path = folder / NAME
    name = shown(path)
    try:
        return plain_file.text(path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8: {error.reason} at byte {error.start:,}") from None
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def read_all(folders: Sequence[Path]) -> tuple[list[CampaignFile], list[str]]:
    """Each campaign's file, and a line for each that cannot be read."""
    found, problems = [], []
    for folder in folders:
        try:
            found.append(read(folder))
        except ConfigError as error:
            found.append(CampaignFile())
            problems.append(f"{error}; skipped")
    return found, problems


def command(verb: str, arguments: Sequence[str], config_dirs: Sequence[Path] = ()) -> str:
    """The command line as it is recorded: of an absolute path, which may name a person or a machine, only the last
    part."""
    kept = [word for word in arguments if not word.startswith(_DROPPED)]
    kept += [word for folder in config_dirs for word in ("--config-dir", str(folder))]
    return shown(shlex.join(["sp-bench", verb, *(_PATH.sub(_last_part, word) for word in kept)]), 10_000)


def to_continue(folder: Path, config_dirs: Sequence[Path] = ()) -> list[tuple[list[str], list[Path]]]:
    """(words after the verb, --config-dir folders) of each command of a campaign's file, once each. Left out: which
    campaign it is, and where. config_dirs: in place of the folders that the commands had.

    Raises:
        ConfigError: the file has no commands, or cannot be used; a command cannot be read, or had an absolute path.
    """
    instead = "give the words of the run instead"
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], None] = {}
    for each in read(folder).commands:
        try:
            words = shlex.split(each.words)[2:]
        except ValueError as error:
            raise ConfigError(f"{shown(folder / NAME)}: {shown(each.words)}: {error}; {instead}") from None
        own, its_dirs = _parted(words)
        if any(".../" in word for word in own):
            raise ConfigError(f"{shown(folder / NAME)}: {shown(each.words)} has no whole path; {instead}")
        if not config_dirs and any(".../" in word for word in its_dirs):
            raise ConfigError(f"{shown(folder / NAME)}: {shown(each.words)} has no whole path; give --config-dir")
        if own:
            kept = tuple(word for word in own if not word.startswith(("campaign=", "results_root=")))
            found[kept, tuple(map(str, config_dirs)) or its_dirs] = None
    if not found:
        raise ConfigError(f"{shown(folder / NAME)} has no commands to continue; {instead}")
    return [(list(own), [Path(each) for each in dirs]) for own, dirs in found]


def _parted(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words without --config-dir, and its folders."""
    after = [place + 1 for place, word in enumerate(words[:-1]) if word == "--config-dir"]
    own = [word for place, word in enumerate(words) if place not in after and word != "--config-dir"]
    return own, tuple(words[place] for place in after)


def append(folder: Path, words: str, commit: str | None) -> None:
    """Add a command to the campaign's file, whole or not at all, unless it is there with the same code. The rest of the
    file stays. No other process may append meanwhile.

    Raises:
        ConfigError: the file cannot be read, or `commands` is not the last of its keys.
        OSError: it cannot be written.
    """
    old = text(folder)
    known = _parsed(old, folder)
    new = Command(words, datetime.now(UTC).strftime(TIME), commit or "")
    if any((each.words, each.commit) == (new.words, new.commit) for each in known.commands):
        return
    entry = yaml.safe_dump([{k: v for k, v in vars(new).items() if v}], sort_keys=False, width=10_000)
    indent = (re.findall(r"^( *)- ", old, re.MULTILINE) or [""])[-1] if known.commands else ""
    entry = "".join(indent + line for line in entry.splitlines(keepends=True))
    before = old or HEADER
    before += "\n" * (not before.endswith("\n")) + "commands:\n" * (not re.search("^commands:", old, re.MULTILINE))
    try:
        written = _parsed(before + entry, folder)
    except ConfigError:
        written = None
    if written is None or written != CampaignFile(**{**vars(known), "commands": (*known.commands, new)}):
        raise ConfigError(
            f"{shown(folder / NAME)}: `commands` is not its last key, or not a list of lines that begin with `- `"
        )
    temporary = folder / WORK / f"{NAME}.{os.getpid()}"
    temporary.write_text(before + entry, "utf-8")
    os.replace(temporary, folder / NAME)


def _last_part(path: re.Match[str]) -> str:
    return f".../{path[0].rstrip('/').rpartition('/')[2]}"


def _parsed(content: str, folder: Path) -> CampaignFile:
    name = shown(folder / NAME)
    found = read_yaml(content, name) or {}
    commands = found.pop("commands", None) if isinstance(found, dict) else None
    if not isinstance(commands, list | None):
        raise ConfigError(f"{name}: commands must be a list")
    listed = (_texts(each, Command, f"{name}: commands[{i}].") for i, each in enumerate(commands or ()))
    return CampaignFile(**_texts(found, CampaignFile, f"{name}: "), commands=tuple(Command(**each) for each in listed))


def _texts(found: Any, kind: Any, prefix: str) -> dict[str, str]:
    """The fields of `kind` that a mapping has. prefix: stands before a key in errors."""
    if not isinstance(found, dict):
        raise ConfigError(f"{prefix.rstrip(': .')} must map names to texts")
    names = [field.name for field in fields(kind)]
    given = {}
    for key, value in found.items():
        if key not in names:
            raise ConfigError(f"{prefix}{shown(key)} is not a key; {nearest(key, names)}keys: {', '.join(names)}")
        if isinstance(value, datetime):  # as YAML reads a time without quotes
            value = (value.astimezone(UTC) if value.tzinfo else value).strftime(TIME)
        if not isinstance(value, str | None):
            raise ConfigError(f"{prefix}{key} must be text; put it into quotes")
        given[key] = (value or "").strip()
    return given
