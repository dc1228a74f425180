"""Runs a page in Chromium, offline, at the width of a desk and of a phone."""

import base64
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDE, NARROW, HEIGHT = 1400, 420, 900
LIMIT_S = 120
COLLECT = 'addEventListener("message", (told) => fetch("/told", { method: "POST", body: told.data }));'


def command(folder: Path) -> list[str]:
    """Chromium with a fresh profile and without a network: it resolves no name."""
    assert CHROMIUM is not None
    how = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    how += [f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    return [CHROMIUM, *how, f"--window-size={WIDE},{HEIGHT}"]


def chromium(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs to its end."""
    return subprocess.run([*command(folder), *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=True)


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


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, "Queue[dict[str, Any]]"]]:
    """Serves the folder on this machine: its address, and what pages post to it."""
    told: Queue[dict[str, Any]] = Queue()

    class Handler(SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), lambda *each: Handler(*each, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", told
        finally:
            server.shutdown()


def seen(folder: Path, page: str) -> dict[int, dict[str, Any]]:
    """What a probe posts to the page around it, by the width of its frame.

    It waits for both frames: a browser's virtual time is over before the page has drawn where the machine is busy.
    """
    with (
        served(folder) as (address, told),
        subprocess.Popen([*command(folder), f"{address}/{page}"], stderr=subprocess.DEVNULL) as browser,
    ):
        try:
            found = [told.get(timeout=LIMIT_S) for _ in (NARROW, WIDE)]
        finally:
            browser.terminate()
    return {each["width"]: each for each in found}
