"""The artifact of a paper: rows, plans, proofs, environment, report and checksums of campaigns in one zip. Equal rows
give equal bytes."""

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from sp_bench.analysis.selection import RAW, select
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.report import Options, build, reproduction
from sp_bench.report.anonymous import anonymous
from sp_bench.report.page.appendix import environment
from sp_bench.rows import campaign_file, git, packed, plain_file, plans, proofs, store
from sp_bench.rows.digest import DIGEST, digests
from sp_bench.rows.frame import of_table
from sp_bench.rows.schema import SCHEMA

SUMS = "SHA256SUMS"
README = """Rows of sp_bench{names}.

rows/<campaign>/*.parquet   one row an attempt; sp_bench.load, pandas, DuckDB and polars read them
rows/<campaign>/_plans      what the runs planned
rows/<campaign>/_proofs     what was proven once for several rows, which name it in their column proof
rows/<campaign>/_campaign.yaml  their commands, and what no row says
report/index.html           page, figures and tables made from these rows
environment.txt             what the rows ran on
REPRODUCE.md                how to measure it again: commands, hardware, time, tolerance
SHA256SUMS                  of every other file: sha256sum --check SHA256SUMS
CITATION.cff                how to cite

Made by sp_bench {version}: sp-bench archive.
"""
CITATION = """cff-version: 1.2.0
message: If you use these rows, please cite the software that measured them.
type: software
title: "sp_bench: Ulysses sequence parallelism or Ring Attention?"
authors:
  - name: The sp_bench authors
version: {version}
{commit}license: Apache-2.0
"""


def write(
    folders: Sequence[Path],
    out: Path,
    options: Options,
    *,
    executor: Executor | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> int:
    """Write the archive of some campaigns, whole or not at all. Returns the number of its files. An anonymous archive
    has the rows of the report, anonymous as there, and no plans and proofs.

    Raises:
        OSError: a campaign cannot be read, or `out` cannot be written.
        ValueError: a row cannot be read, or two campaigns have one name.
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"two campaigns have one name: {', '.join(sorted(names))}; archive them apart")
    selection = select(folders, executor=executor)
    if selection.unread:
        raise ValueError(f"{selection.unread[0]} cannot be read; move it away, or repair it")
    files: dict[str, bytes] = {}
    for name, folder in zip(names, folders, strict=True) if not options.anonymous else ():
        try:
            in_pack = packed.names(folder)
        except ValueError as error:  # a link that leads out would be read, a pipe waited for
            raise ValueError(f"{folder / packed.PACK} cannot be read ({shown(str(error))}); move it away") from error
        rows = {row.file_name: folder / row.file_name for row in store.committed(folder)}
        rows |= {packed.PACK: folder / packed.PACK} if in_pack else {}
        planned = {f"{plans.FOLDER}/{path.name}": path for path in (folder / plans.FOLDER).glob("[!.]*.json")}
        proven = {f"{proofs.FOLDER}/{path.name}": path for path in proofs.files(folder)}
        kept = {each: path for each, path in (planned | proven).items() if plain_file.is_plain(path)}
        kept |= {each: path for each, path in rows.items() if path.exists()}
        files |= {f"rows/{name}/{each}": path.read_bytes() for each, path in kept.items()}
        with suppress(ConfigError):  # the report names it
            if text := campaign_file.text(folder):
                files[f"rows/{name}/{campaign_file.NAME}"] = text.encode()
    with tempfile.TemporaryDirectory() as place:
        built = build(folders, Path(place) / "report", options, executor=executor, say=say)
        made = (path for path in built.page.parent.rglob("*") if path.is_file() and path.name[0] != ".")
        files |= {f"report/{path.relative_to(built.page.parent).as_posix()}": path.read_bytes() for path in made}
    version = metadata.version("sp_bench")
    given = selection
    if options.anonymous:
        given = anonymous(selection)
        files |= _packs(_with_samples(given.rows, list(selection.rows["file"]), folders))
    git_shas = [sha for sha in given.rows["git_sha"].unique() if isinstance(sha, str)]
    commits = [(f"commit of {sha}", commit) for sha, commit in git.commits_of_trees(git_shas).items()]
    texts = {
        "REPRODUCE.md": reproduction.markdown(given.rows, {} if options.anonymous else _commands(names, folders)),
        "environment.txt": "".join(f"{what}: {value}\n" for what, value in [*environment(given), *commits]),
        "README.txt": _readme(() if options.anonymous else names, version),
        "CITATION.cff": CITATION.format(version=version, commit=_newest_commit(given.rows)),
    }
    files |= {name: text.encode() for name, text in texts.items()}
    sums = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    say("compressing")
    _zip(files | {SUMS: sums.encode()}, out)
    return len(files) + 1


def _commands(names: Sequence[str], folders: Sequence[Path]) -> dict[str, list[str]]:
    files, _ = campaign_file.read_all(folders)  # the report names what cannot be read
    return {name: [each.words for each in file.commands] for name, file in zip(names, files, strict=True)}


def _readme(names: Sequence[str], version: str) -> str:
    """names: of the campaigns; an anonymous archive has none of them, no plans and no proofs."""
    text = README.format(names=f": {', '.join(names)}" if names else "", version=version)
    return "".join(line for line in text.splitlines(True) if names or not line.startswith("rows/<campaign>/_"))


def _newest_commit(rows: pd.DataFrame) -> str:
    """The line of CITATION.cff; empty if unknown."""
    known = [(at, sha) for at, sha in zip(rows["started_at"], rows["git_sha"], strict=True) if isinstance(sha, str)]
    return f"commit: {git.short(max(known)[1], 40)}\n" if known else ""


def _with_samples(rows: pd.DataFrame, files: Sequence[str], folders: Sequence[Path]) -> pd.DataFrame:
    """The rows with the columns that a selection leaves out, numbers alone. files: where each row lay."""
    found = []
    for folder in folders:
        samples = of_table(store.read(folder, [*RAW, *store.IDENTITY])[0])
        names = samples[["trial_id", "env_id", "attempt", "status"]].itertuples(index=False)
        samples.index = pd.Index([f"{folder.resolve().name}/{store.RowName(*each).file_name}" for each in names])
        found.append(samples)
    every = pd.concat(found).loc[files]
    return rows.assign(**{name: every[name].to_list() for name in RAW})


def _packs(rows: pd.DataFrame) -> dict[str, bytes]:
    """Path in the archive -> a pack of the rows of each campaign, with digests of their own, which `sp_bench.load` and
    `report` read."""
    files = {}
    for folder, of in rows.sort_values("file").groupby("folder"):
        table = pa.Table.from_pandas(of[SCHEMA.names], SCHEMA, preserve_index=False).replace_schema_metadata()
        table = table.set_column(SCHEMA.get_field_index(DIGEST), DIGEST, pa.array(digests(table)))
        table = table.append_column(packed.FILE_NAME, pa.array(of["file"].str.rpartition("/")[2]))
        content = pa.BufferOutputStream()
        pq.write_table(table, content, compression="zstd", store_schema=False, write_page_checksum=True)
        files[f"rows/{folder}/{packed.PACK}"] = content.getvalue().to_pybytes()
    return files


def _zip(files: dict[str, bytes], out: Path) -> None:
    """Write a zip with sorted names, and without times and owners."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(files):
                entry = zipfile.ZipInfo(name)
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(entry, files[name])
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
