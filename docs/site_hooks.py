"""What mkdocs calls when it builds the site: pages that are made, and links to files that are beside docs/."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from sp_bench.config.options import OPTIONS
from sp_bench.report import explorer
from sp_bench.report.templates import Rows, rendered
from sp_bench.rows.schema import COLUMNS

ROOT = Path(__file__).parents[1]
BUILT = ("RESULTS.md", "CAMPAIGNS.md")
EXPLORER = "explorer.html"
CAMPAIGN = re.compile(r"\]\((?:\.\./)?results/([\w.-]+)/_campaign\.yaml")
OUTSIDE = re.compile(r"\[([^\]\n]*(?:\n[^\]\n]+)*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """README.md is the first page, and the declarations of options and of columns are pages. Pages that are not
    committed are made from the rows, unless they were written. The explorer is a file of its own."""
    readme = (ROOT / "README.md").read_text("utf-8").replace("](docs/", "](").replace('src="docs/', 'src="')
    files.append(File.generated(config, "index.md", content=readme))
    for name, content in DECLARED.items():
        files.append(File.generated(config, name, content=content()))
    campaigns = sorted(path for path in (ROOT / "results").iterdir() if path.is_dir())
    files.append(File.generated(config, EXPLORER, content=explorer.page(campaigns)[0]))
    rows = Rows(campaigns)
    for name in BUILT:
        if not (ROOT / "docs" / name).exists():
            files.append(File.generated(config, name, content=rendered(ROOT / f"docs/{name}.jinja", rows)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A file of the repository that is no page is named, and must be there. A campaign has a section of a page."""
    markdown = CAMPAIGN.sub(r"](CAMPAIGNS.md#\1", markdown)

    def named(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if target in (*DECLARED, *BUILT) or ((ROOT / "docs" / target).exists() and ".." not in target):
            return link[0]  # a page or a figure
        base = ROOT if page.file.src_uri == "index.md" else ROOT / "docs"
        if not (base / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {target} is linked and not there")
        path = (base / target).resolve().relative_to(ROOT).as_posix()
        return text if path in text else f"{text} (`{path}`)"

    return OUTSIDE.sub(named, markdown)


def options() -> str:
    """All options, in the words of their declarations."""
    lines = [(f"`{o.path}`", o.type.__name__, o.doc, o.unit, o.column or "", ", ".join(o.of) or "all") for o in OPTIONS]
    text = "What a trial is, as `sp_bench/config/` declares it. On the command line: `path=value`."
    return table("Options", text, ("path", "type", "meaning", "unit", "column", "workloads"), lines)


def columns() -> str:
    """All columns of a row, in the words of their declarations."""
    lines = [(f"`{c.name}`", c.doc, c.unit, c.per or "", c.source) for c in COLUMNS]
    text = (
        "What a row holds, as `sp_bench/rows/schema.py` declares it. Per: a list with one entry for each. From: the "
        "driver; what was asked for; what the ranks measured; or derived from it. [Metrics](METRICS.md) says how."
    )
    return table("Columns", text, ("column", "meaning", "unit", "per", "from"), lines)


def table(title: str, text: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A page with one table."""
    body = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines]
    return "\n".join([f"# {title}", f"{text}\n", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *body]) + "\n"


DECLARED = {"OPTIONS.md": options, "COLUMNS.md": columns}
