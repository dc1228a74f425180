"""Runs a page in Chromium, offline, at the width of a desk and of a phone."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDE, NARROW, HEIGHT = 1400, 420, 900
NOT_OURS = "*"  # addresses that the browser may not resolve: it is offline
COLLECT = """
addEventListener("message", (told) => {
  const text = document.createElement("pre");
  text.textContent = told.data;
  document.body.append(text);
});
"""


def chromium(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs to its end with a fresh profile and without a network."""
    assert CHROMIUM is not None
    how = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    how += [f"--user-data-dir={folder / 'profile'}", f"--host-resolver-rules=MAP {NOT_OURS} ~NOTFOUND"]
    return subprocess.run(
        [CHROMIUM, *how, f"--window-size={WIDE},{HEIGHT}", *arguments],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


def framed(name: str) -> str:
    """The page at both widths side by side: a browser's own window does not become as narrow as a phone."""
    frames = (f'<iframe src="{escape(name)}" width="{w}" height="{HEIGHT}"></iframe>' for w in (NARROW, WIDE))
    return f"<!doctype html><meta charset=utf-8><script>{COLLECT}</script><body>{''.join(frames)}"


def probed(html: str, probe: str) -> str:
    """The page with one more script, which its policy then allows by hash too."""
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    allowed = html.replace("script-src ", f"script-src &#39;sha256-{digest}&#39; ")
    head, body, rest = allowed.rpartition("</body>")
    return f"{head}<script>{probe}</script>{body}{rest}"


def seen(folder: Path, page: str) -> dict[int, dict[str, Any]]:
    """What a probe posts to the page around it, by the width of its frame."""
    done = chromium(folder, "--virtual-time-budget=20000", "--dump-dom", (folder / page).as_uri())
    found = [json.loads(unescape(text)) for text in re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)]
    return {each["width"]: each for each in found}
