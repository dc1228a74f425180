"""docs/CAMPAIGNS.md: where rows come from, by the rows and the campaigns' `_campaign.yaml`. A table with one line per
campaign, then the commands and remarks of each."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sp_bench.analysis.device_sets import numbered
from sp_bench.formats import counted, escape_markdown, without_escapes
from sp_bench.rows import campaign_file, consistency, git
from sp_bench.rows.campaign_file import CampaignFile
from sp_bench.rows.frame import of_table

COLUMNS = ("status", "git_sha", "git_dirty", "started_at", "environment")
HEADS = ("campaign", "command", "commit", "hardware", "rows", "remarks")
WIDTH = 60  # characters of a command or remark in the table; longer ones stand below it
_NO_DOCUMENT = re.compile(r"\]\((?![\w./-]+\.md(?:#[\w-]+)?\))|\](?=:)")  # remarks may link to documents only


def markdown(folders: Sequence[Path]) -> tuple[str, list[str]]:
    """The page, and a line for each file that cannot be read.

    Raises:
        OSError: a campaign cannot be read.
    """
    folders = sorted(folders, key=lambda folder: folder.resolve().name)  # the order must not depend on the shell
    files, problems = campaign_file.read_all(folders)
    tables = []
    names = [re.sub("[^A-Za-z0-9._-]", "_", folder.resolve().name) for folder in folders]  # as `campaign` may be
    for name, folder in zip(names, folders, strict=True):
        rows, unread = consistency.read(folder, COLUMNS)
        tables.append(of_table(rows).assign(folder=name))
        problems += [f"{folder}: {line}" for line in unread]
    rows = pd.concat(tables, ignore_index=True)
    rows["device_set"] = _by_first_use(numbered(rows["environment"]), rows["started_at"])
    commits = git.commits_of_trees(sha for sha in rows["git_sha"].unique() if isinstance(sha, str))
    campaigns = [(name, file, rows.loc[rows["folder"] == name]) for name, file in zip(names, files, strict=True)]
    lines = [
        f"{counted(len(rows), 'row')} of {counted(len(folders), 'campaign')}. {_machines(rows)}",
        "",
        f"| {' | '.join(HEADS)} |",
        f"|{'---|' * len(HEADS)}",
        *(f"| {' | '.join(_line(*each, commits))} |" for each in campaigns),
        "",
        *(line for name, file, _ in campaigns for line in _section(name, file)),
    ]
    return "\n".join(lines), problems


def _line(name: str, file: CampaignFile, rows: pd.DataFrame, commits: Mapping[str, str]) -> tuple[str, ...]:
    command = file.commands[0].words.removeprefix("sp-bench run ").replace("`", "'") if file.commands else ""
    more = f" and {len(file.commands) - 1} more" if len(file.commands) > 1 else ""
    remarks = "; ".join(filter(None, [_superseded(file), file.differs, file.remarks]))
    return (
        f"[`{name}`](#{name})" if _section(name, file) else f"`{name}`",
        f"`{_cut(command)}`{more}".replace("|", r"\|") if command else "",
        _cell(file.commit) or _commits(rows, commits),
        _hardware(rows),
        _statuses(rows),
        _cell(_cut(remarks)),
    )


def _section(name: str, file: CampaignFile) -> list[str]:
    """A campaign's commands, machine and remarks; empty if its file has none."""
    texts = [
        f"This campaign is {_superseded(file)}." if file.superseded_by else "",
        f"Differs from the sweep: {file.differs}." if file.differs else "",
        f"Machine: {file.machine}." if file.machine else "",
        file.remarks,
    ]
    commands = [f"    {' '.join(command.words.split())}" for command in file.commands]
    parts = ["\n".join(commands), *map(_remark, texts)]
    return [f"### `{name}`", "", *(line for text in parts if text for line in (text, ""))] if any(parts) else []


def _superseded(file: CampaignFile) -> str:
    return f"superseded by `{file.superseded_by}`" if file.superseded_by else ""


def _remark(text: str) -> str:
    """Markdown without HTML, and without headings, which would end the section."""
    plain = _NO_DOCUMENT.sub(lambda match: f"\\{match[0]}", without_escapes(text).replace("<", "&lt;"))
    return re.sub(r"^(\s*)#", r"\1\\#", plain, flags=re.MULTILINE)


def _cell(text: str) -> str:
    """Markdown as plain text: without marks and links."""
    return escape_markdown(re.sub(r"[`*\[\]]|\([^)]*\.md\)", "", without_escapes(text)))


def _cut(text: str) -> str:
    one_line = " ".join(text.split())
    if len(one_line) <= WIDTH:
        return one_line
    return f"{one_line[:WIDTH].rpartition(' ')[0] or one_line[:WIDTH]} …"


def _commits(rows: pd.DataFrame, commits: Mapping[str, str]) -> str:
    """The commits of the rows' code; if rows have none, the commit in the campaign's file."""
    found = set()
    for sha, dirty in zip(rows["git_sha"], rows["git_dirty"], strict=True):
        if isinstance(sha, str):
            known = commits.get(sha)
            found.add(git.short(known or sha) + " with changes" * (dirty is True and known is None))
    return f"{', '.join(sorted(found))}, in the rows" if found else ""


def _statuses(rows: pd.DataFrame) -> str:
    return ", ".join(f"{number:,} {status}" for status, number in Counter(rows["status"]).most_common())


def _by_first_use(sets: Iterable[Any], started: Iterable[Any]) -> list[int | None]:
    """Numbers machines by their first use, so that a new campaign changes no number."""
    known = [(None if each is pd.NA else int(each), at) for each, at in zip(sets, started, strict=True)]
    first: dict[int, Any] = {}
    for each, at in known:
        if each is not None and at is not pd.NaT:
            first[each] = min(first.get(each, at), at)
    numbers = {each: number for number, each in enumerate(sorted(first, key=lambda each: (first[each], each)), start=1)}
    return [None if each is None else numbers.get(each) for each, _ in known]


def _hardware(rows: pd.DataFrame) -> str:
    """4 x H200, machine 14, NV18, 64 cores."""
    environments = [each for each in rows["environment"] if isinstance(each, Mapping)]
    used = [Counter(_devices(each).values()) for each in environments]
    most = {name: max(each[name] for each in used) for name in sorted({name for each in used for name in each})}
    machines = sorted({int(number) for number in rows["device_set"].dropna()})
    links = sorted({link for each in environments for link in re.findall(r"\bNV\d+\b", str(each.get("topology")))})
    cores = sorted({int(each["cpu_cores"]) for each in environments if each.get("cpu_cores")})
    parts = [
        *(f"{number} x {name}" for name, number in most.items()),
        f"machine{'s' * (len(machines) > 1)} {', '.join(map(str, machines))}" if machines else "",
        *links,
        f"{' and '.join(map(str, cores))} cores" if cores else "",
    ]
    return ", ".join(filter(None, parts))


def _machines(rows: pd.DataFrame) -> str:
    """The numbers of machines and their devices. Two pairs of GPUs on one host count as two machines."""
    devices: dict[int, dict[str, str]] = {}
    for machine, environment in zip(rows["device_set"], rows["environment"], strict=True):
        if not pd.isna(machine):
            devices.setdefault(int(machine), {}).update(_devices(environment))
    kinds = (Counter(each.values()).most_common(1)[0] for each in devices.values())
    sizes = Counter(f"{number} x {name}" for name, number in kinds)
    parts = [f"{number} of {size}" for size, number in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))]
    return f"Machines, by the UUIDs of their devices and numbered by first use: {', '.join(parts)}." if parts else ""


def _devices(environment: Mapping[str, Any]) -> dict[str, str]:
    """UUID -> name; ranks may share a device. NVML's spelling of a UUID begins with GPU-, torch's does not."""
    uuids, names = (environment.get(key) for key in ("device_uuids", "device_names"))
    known = zip(uuids, names, strict=False) if uuids is not None and names is not None else ()
    return {str(uuid).removeprefix("GPU-"): re.sub(r"^NVIDIA | HBM3$", "", str(name)) for uuid, name in known}
