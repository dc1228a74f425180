"""The page in a real browser, offline, at the width of a desk and of a phone."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sp_bench.report.figures.style import Drawing

from .browser import CHROMIUM, HEIGHT, NARROW, WIDE, chromium, framed, probed
from .browser import seen as seen_in
from .pages import page_of
from .rows import row

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")

PROBE = """
const heading = [...document.querySelectorAll("th")].find((each) => each.textContent.startsWith("step (ms)"));
const table = heading.closest("table");
const column = heading.cellIndex, button = heading.querySelector("button");
const values = () => [...table.tBodies[0].rows].map((r) => r.cells[column].textContent);
const seen_closed = !document.getElementById("appendix").open;
const seen = { closed: seen_closed, orders: [values()], sorts: [heading.getAttribute("aria-sort")] };
document.querySelectorAll("details").forEach((each) => { each.open = true; });
button.focus();
seen.focused = document.activeElement === button;
for (const _ of [1, 2]) {
  button.click();
  seen.orders.push(values());
  seen.sorts.push(heading.getAttribute("aria-sort"));
}
seen.width = innerWidth;
seen.overflow = document.documentElement.scrollWidth - innerWidth;
seen.dark = getComputedStyle(document.body).backgroundColor;
seen.skip = document.querySelector("a").getAttribute("href");
const lines = [...document.querySelectorAll("table.setting tbody tr")].filter((r) => r.querySelector("td"));
seen.tabs = lines.map((r) => r.querySelectorAll("a").length);
const cards = [...document.querySelectorAll(".card")].map((each) => each.getBoundingClientRect());
seen.bottom = Math.max(...cards.map((each) => each.bottom));
seen.cut = cards.filter((each) => each.right > innerWidth).length;
const frames = [...document.querySelectorAll(".wide, .sheet")];
seen.hidden = frames.filter((each) => each.getBoundingClientRect().right > innerWidth + 1).length;
parent.postMessage(JSON.stringify(seen), "*");
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with a figure, links, words that are long and tables that are wide."""
    place = tmp_path_factory.mktemp("page")
    rows = [
        row(method=f"method_{k}", median_ms=ms, replicate=r)
        for k, ms in enumerate((900.0, 10.0, 1234.5, 20.0))
        for r in range(6)
    ]
    rows += [row(status="oom", method="method_4"), row(status="error", method="m", reason="x" * 300 + " <b>")]
    picture = place / "picture.png"
    Image.new("RGB", (1382, 400), "white").save(picture)
    files = {"png": picture.read_bytes()}
    drawing = Drawing("memory", "memory-x", "A caption.", 691, files)
    html = page_of(rows, [drawing]).html
    (place / "page.html").write_text(html, "utf-8")
    (place / "probed.html").write_text(probed(html, PROBE), "utf-8")
    (place / "both.html").write_text(framed("page.html"), "utf-8")
    (place / "both_probed.html").write_text(framed("probed.html"), "utf-8")
    return place


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[int, dict[str, object]]:
    """What the probe tells at each width."""
    return seen_in(folder, "both_probed.html")


def test_it_opens_offline_at_both_widths_without_a_word_on_the_console_and_shows_something(folder: Path) -> None:
    picture = folder / "screenshot.png"
    done = chromium(
        folder,
        f"--screenshot={picture}",
        f"--window-size={WIDE + NARROW + 40},{HEIGHT}",
        (folder / "both.html").as_uri(),
    )
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    pixels = np.asarray(Image.open(picture).convert("L"), dtype=float)
    for left, width in ((0, NARROW), (NARROW + 10, WIDE)):
        assert pixels[:, left : left + width].std() > 10


def test_the_browser_tells_of_what_the_policy_forbids(folder: Path) -> None:
    """So that the silence above means something."""
    html = (folder / "page.html").read_text("utf-8").replace("</body>", "<script>1</script></body>")
    (folder / "forbidden.html").write_text(html, "utf-8")
    done = chromium(folder, "--dump-dom", (folder / "forbidden.html").as_uri())
    assert any("CONSOLE" in line and "Content Security Policy" in line for line in done.stderr.splitlines())


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_the_body_never_scrolls_sideways(seen: dict[int, dict[str, object]], width: int) -> None:
    assert seen[width]["overflow"] <= 0  # type: ignore[operator]


def test_a_column_of_numbers_sorts_by_value_in_both_directions_with_dashes_last(
    seen: dict[int, dict[str, object]],
) -> None:
    dashes = ["\N{EN DASH}"] * 2
    assert sorted(seen[WIDE]["orders"][0]) == sorted([*dashes, "10.0", "20.0", "900", "1,234"])  # type: ignore[index]
    assert seen[WIDE]["orders"][1:] == [  # type: ignore[index]
        ["10.0", "20.0", "900", "1,234", *dashes],
        ["1,234", "900", "20.0", "10.0", *dashes],
    ]
    assert seen[WIDE]["sorts"] == [None, "ascending", "descending"]


def test_the_keyboard_reaches_headings_each_line_once_and_first_of_all_a_way_past_the_menu(
    seen: dict[int, dict[str, object]],
) -> None:
    assert seen[WIDE]["focused"]
    assert seen[WIDE]["skip"] == "#figures"
    assert set(seen[WIDE]["tabs"]) == {1}  # type: ignore[call-overload]


def test_the_cards_are_on_the_first_screen_and_nothing_is_cut_on_a_phone(seen: dict[int, dict[str, object]]) -> None:
    assert seen[WIDE]["bottom"] < HEIGHT  # type: ignore[operator]
    assert (seen[NARROW]["cut"], seen[NARROW]["hidden"]) == (0, 0)
    assert seen[WIDE]["closed"]
