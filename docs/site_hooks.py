"""What mkdocs calls when it builds the site: pages that are made, and links to files that are beside docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from sp_bench.config.options import OPTIONS
from sp_bench.report import explorer
from sp_bench.report.templates import Rows, rendered

ROOT = Path(__file__).parents[1]
BUILT = ("RESULTS.md", "CAMPAIGNS.md")
EXPLORER = "explorer.html"
OUTSIDE = re.compile(r"\[([^\]\n]*(?:\n[^\]\n]+)*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """README.md is the first page, and the declarations of the options are a page. Pages that are not committed are
    made from the rows, unless they were written. The explorer is a file of its own."""
    readme = (ROOT / "README.md").read_text("utf-8").replace("](docs/", "](").replace('src="docs/', 'src="')
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "OPTIONS.md", content=options()))
    campaigns = sorted(path for path in (ROOT / "results").iterdir() if path.is_dir())
    files.append(File.generated(config, EXPLORER, content=explorer.page(campaigns)[0]))
    rows = Rows(campaigns)
    for name in BUILT:
        if not (ROOT / "docs" / name).exists():
            files.append(File.generated(config, name, content=rendered(ROOT / f"docs/{name}.jinja", rows)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A file of the repository that is no page is named, and must be there."""

    def named(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if target in ("OPTIONS.md", *BUILT) or ((ROOT / "docs" / target).exists() and ".." not in target):
            return link[0]  # a page or a figure
        base = ROOT if page.file.src_uri == "index.md" else ROOT / "docs"
        if not (base / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {target} is linked and not there")
        path = (base / target).resolve().relative_to(ROOT).as_posix()
        return text if path in text else f"{text} (`{path}`)"

    return OUTSIDE.sub(named, markdown)


def options() -> str:
    """A table of all options, in the words of their declarations."""
    lines = [
        "# Options",
        "What a trial is, as `sp_bench/config/` declares it. On the command line: `path=value`.\n",
        "| path | type | meaning | unit | column | workloads |",
        "|---|---|---|---|---|---|",
    ]
    for each in OPTIONS:
        cells = (
            f"`{each.path}`",
            each.type.__name__,
            each.doc,
            each.unit,
            each.column or "",
            ", ".join(each.of) or "all",
        )
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"
