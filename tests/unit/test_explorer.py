"""The explorer: what it compares, what it carries, and the page in a real browser, offline."""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sp_bench import cli
from sp_bench.analysis.cells import cells, of_equal_steps
from sp_bench.analysis.settings import settings
from sp_bench.config.parsing import ConfigError
from sp_bench.report import explorer

from .browser import CHROMIUM, NARROW, WIDE, chromium, framed, probed, seen
from .rows import commit, hf_step, row, selection_of

HOSTILE = "</script><script>document.title = 'x'</script><!--\u202e"
ON_GPUS = {"hardware": "h200", "fabric": "nvlink", "kernel": "cudnn", "sp_size": 4, "dtype": "bfloat16"}
SPLITS = {"ulysses": {"ulysses_degree": 4, "ring_degree": 1}, "ring": {"layout": "zigzag"}}


def on_gpus(method: str, median_ms: float, replicates: int = 6, **columns: Any) -> list[dict[str, Any]]:
    config = {"hardware": {"name": "h200", "device": "cuda"}, **columns.pop("config", {})}
    given = {**ON_GPUS, **SPLITS[method], "method": method, "config": json.dumps(config), **columns}
    return [
        row(
            median_ms=median_ms * (1 + k / 1e4),
            replicate=k,
            step_ms=[median_ms] * 30,
            window_ms=[median_ms * 30] * 4,
            **given,
        )
        for k in range(replicates)
    ]


def data_of(campaigns: Mapping[str, Iterable[Mapping[str, Any]]], commands: Any = None) -> dict[str, Any]:
    """What the page of these campaigns carries."""
    rows = selection_of(each for made in campaigns.values() for each in made).rows
    folders = [name for name, made in campaigns.items() for _ in made]
    rows = rows.assign(
        folder=folders,
        pool=folders,
        file=[f"{folder}/{file.rpartition('/')[2]}" for folder, file in zip(folders, rows["file"], strict=True)],
    )
    return explorer.data(settings(cells(of_equal_steps(rows))), commands or {})


def word(data: dict[str, Any], picker: str, cell: int) -> str:
    (found,) = (each for each in data["pickers"] if each["name"] == picker)
    return found["words"][found["of"][cell]]


def test_a_verdict_has_ratio_interval_grade_and_campaign() -> None:
    data = data_of({"monday": [*on_gpus("ulysses", 100.0), *on_gpus("ring", 110.0)]})
    (verdict,) = data["verdicts"]
    assert verdict["text"] == "1,024 tokens on 4 GPUs: the zigzag ring takes 1.10x [1.10, 1.10] as long as Ulysses."
    assert (verdict["mark"], verdict["bold"], verdict["weak"]) == ("A", 1, 0)
    assert verdict["where"].endswith("NVLink, H200, monday; 6 replicates")
    assert [word(data, "method", i) for i in verdict["cells"]] == ["Ulysses", "ring"]


def test_the_smallest_effect_decides_what_is_a_tie() -> None:
    rows = selection_of([*on_gpus("ulysses", 100.0), *on_gpus("ring", 110.0)]).rows
    (verdict,) = explorer.data(settings(cells(of_equal_steps(rows)), 0.2), {})["verdicts"]
    assert verdict["text"].endswith("as long as Ulysses (a tie).")


def stacks(of_theirs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A training step of two stacks on one GPU, theirs with these options."""
    ours = [hf_step(seq_len=8192, engine="fsdp2", sp_size=1, replicate=k, median_ms=1000.0) for k in range(2)]
    return ours + [hf_step(seq_len=8192, sp_size=1, replicate=k, median_ms=1400.0, **of_theirs) for k in range(2)]


def test_two_stacks_are_compared_where_they_recompute_and_offload_equally_much() -> None:
    (verdict,) = data_of({"monday": stacks({})})["verdicts"]
    assert "hf_deepspeed takes 1.40x as long as one rank, fsdp2" in verdict["text"]
    assert data_of({"monday": stacks({"offload": "deepspeed_cpu_adam"})})["verdicts"] == []
    assert data_of({"monday": stacks({"kernel": "cudnn"})})["verdicts"] == []


def test_two_campaigns_are_never_compared_or_pooled() -> None:
    data = data_of(
        {"monday": on_gpus("ulysses", 100.0), "tuesday": [*on_gpus("ring", 215.0), *on_gpus("ulysses", 200.0)]}
    )
    assert [each["text"].partition("takes ")[2][:5] for each in data["verdicts"]] == ["1.07x"]
    (step,) = (each["values"] for each in data["quantities"] if each["name"] == "step")
    assert sorted(round(each) for each in step) == [100, 200, 215]


def test_a_recorded_graph_is_not_compared_with_launched_steps() -> None:
    graph = {"config": {"workload": {"name": "attention", "launch": "cuda_graph"}}}
    data = data_of({"monday": [*on_gpus("ulysses", 100.0), *on_gpus("ring", 215.0, **graph)]})
    assert len(data["tokens"]) == 2
    assert data["verdicts"] == []


def test_times_of_cpus_have_no_verdict() -> None:
    assert (
        data_of({"monday": [row(method="ring"), row(method="ulysses", ulysses_degree=2, ring_degree=1)]})["verdicts"]
        == []
    )


def test_an_interval_and_a_ratio_to_ulysses_follow_the_pairs() -> None:
    data = data_of(
        {"monday": [*on_gpus("ulysses", 100.0), *on_gpus("ring", 125.0), *on_gpus("ring", 90.0, 1, seq_len=2048)]}
    )
    numbers = {each["name"]: each for each in data["quantities"]}
    ring = next(i for i in range(3) if word(data, "method", i) == "ring" and data["tokens"][i] == 1024)
    alone = data["tokens"].index(2048)
    assert numbers["ratio"]["values"][ring] == 1.25
    assert numbers["ratio"]["values"][alone] is None
    assert numbers["step"]["low"][ring] == 125.0
    assert numbers["step"]["low"][alone] is None
    assert numbers["tokens_per_s"]["high"][ring] == pytest.approx(1024 / 4 / 0.125, rel=1e-4)
    assert (word(data, "grade", ring), word(data, "grade", alone)) == ("A", "C")


def test_a_label_names_no_option_that_is_not_set() -> None:
    machine = {"name": "h200", "device": "cuda", "allocator": "expandable_segments"}
    plain, other = on_gpus("ulysses", 100.0), on_gpus("ulysses", 90.0, config={"hardware": machine})
    found = data_of({"monday": [*plain, *other]})
    parts = [set(each) for each in found["settings"]]
    assert sorted(map(len, (parts[0] - parts[1], parts[1] - parts[0]))) == [0, 1]


def test_what_was_out_of_memory_is_marked_and_what_was_refused_is_not_there() -> None:
    refused = row(status="unsupported", method="ulysses", sp_size=3, seq_len=99)
    data = data_of(
        {"monday": [*on_gpus("ring", 100.0), *[row(status="oom", **ON_GPUS, **SPLITS["ring"], seq_len=4096)], refused]}
    )
    assert dict(zip(data["tokens"], data["oom"], strict=True)) == {1024: 0, 4096: 1}


def test_no_name_becomes_html() -> None:
    html = explorer.html(data_of({HOSTILE: on_gpus("ring", 100.0)}, {HOSTILE: [HOSTILE]}), "window.vegaEmbed = 0;")
    assert html.count("<script") == html.count("</script>") == 3
    assert "<!--\\u" not in html
    assert "\u202e" not in html
    (text,) = re.findall(r'id="data">(.*?)</script>', html)
    assert any("document.title" in name for name in json.loads(text)["commands"])


def test_without_vega_lite_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ConfigError, match=r"pip install 'sp-bench\[explorer\]'"):
        explorer.page([commit([row()], tmp_path)])


@pytest.mark.parametrize("name", ["packed.parquet", "nowhere/explorer.html"])
def test_the_page_takes_the_place_of_no_row(tmp_path: Path, name: str, monkeypatch, capsys) -> None:
    folder = commit([row()], tmp_path / "monday")
    monkeypatch.setattr("sys.argv", ["sp-bench", "report", str(folder), "--explore", str(folder / name)])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "ends with .html" in capsys.readouterr().err


def test_rows_without_attention_or_a_training_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="ran or was out of memory"):
        data_of({"monday": [row(status="unsupported")]})


# -- in a browser --

PROBE = """
const found = { width: innerWidth };
const $ = (id) => document.getElementById(id);
const until = async (test) => {
  for (let n = 0; n < 1000 && !test(); n++) await new Promise((go) => setTimeout(go, 20));
};
const drawn = () => until(() => document.querySelectorAll("#panels .mark-symbol path").length);
const choose = async (name, value) => {
  const select = $(`of-${name}`);
  select.value = value;
  $("panels").replaceChildren();
  select.dispatchEvent(new Event("change"));
  return drawn();
};
const saved = async (button) => {
  let blob;
  URL.createObjectURL = (each) => { blob = each; return "#"; };
  HTMLAnchorElement.prototype.click = () => {};
  $(button).click();
  return blob.text();
};
addEventListener("load", async () => {
  await drawn();
  found.verdict = $("verdict").textContent;
  found.marks = document.querySelectorAll("#panels .mark-symbol path").length;
  found.overflow = document.documentElement.scrollWidth - innerWidth;
  found.title = document.title;
  if (innerWidth < 1000) return parent.postMessage(JSON.stringify(found), "*"); // frames share their history
  found.picked_at_first = !$("cell").hidden;
  document.querySelector("#panels .mark-symbol path").dispatchEvent(new MouseEvent("click", { bubbles: true }));
  await until(() => !$("cell").hidden);
  found.cell = $("cell").textContent;
  found.hash = location.hash;
  found.csv = await saved("csv");
  found.latex = await saved("latex");
  await choose("right", "memory");
  const [before, entries] = [location.hash, history.length];
  await choose("campaign", "tuesday");
  found.entries = history.length - entries;
  found.tuesday = [$("verdict").textContent, $("of-link").value, location.hash];
  found.oom = [...document.querySelectorAll("#panels text")].filter((each) => each.textContent === "\\u2715").length;
  location.hash = before;
  await until(() => $("of-campaign").value === "");
  found.before = [$("of-campaign").value, $("of-right").value];
  location.hash = "#campaign=nobody&left=nothing&link=TCP sockets";
  await until(() => $("of-link").value === "TCP sockets");
  found.unknown = [$("of-campaign").value, $("of-left").value, $("of-link").value];
  parent.postMessage(JSON.stringify(found), "*");
});
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vl_convert", reason="pip install 'sp-bench[explorer]'")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    slower = {"fabric": "socket", "seq_len": 4096}
    campaigns = {
        HOSTILE: [*on_gpus("ulysses", 100.0), *on_gpus("ring", 110.0), *on_gpus("ring", 210.0, seq_len=2048)],
        "tuesday": [
            *on_gpus("ring", 300.0, 4, **slower),
            *on_gpus("ulysses", 330.0, 4, **slower),
            *on_gpus("ring", 1.0, 1, **{**slower, "seq_len": 8192, "status": "oom"}),
        ],
    }
    place = tmp_path_factory.mktemp("explorer")
    html = explorer.html(data_of(campaigns, {HOSTILE: ["sp-bench run sweep=x_y"]}), explorer.vega_lite())
    (place / "page.html").write_text(html, "utf-8")
    (place / "both.html").write_text(framed("page.html"), "utf-8")
    (place / "probed.html").write_text(probed(html, PROBE), "utf-8")
    (place / "both_probed.html").write_text(framed("probed.html"), "utf-8")
    return place


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, dict[str, Any]]:
    return seen(folder, "both_probed.html")


def test_it_opens_offline_without_a_word_on_the_console(folder: Path) -> None:
    done = chromium(folder, "--virtual-time-budget=3000", "--dump-dom", (folder / "both.html").as_uri())
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_it_draws_at_both_widths_and_runs_no_name(found: dict[int, dict[str, Any]], width: int) -> None:
    each = found[width]
    assert each["marks"] == 5  # three times, and two ratios
    assert each["overflow"] <= 0
    assert each["title"] == "sp-bench: explorer"
    assert "the zigzag ring takes 1.10x" in each["verdict"]


def test_a_click_on_a_mark_shows_its_rows_and_command_and_the_address_keeps_it(
    found: dict[int, dict[str, Any]],
) -> None:
    each = found[WIDE]
    assert not each["picked_at_first"]
    assert each["cell"].count(".parquet") == 6
    assert "sp-bench show " in each["cell"]
    assert "sp-bench run sweep=x_y" in each["cell"]
    assert "cell=" in each["hash"]


def test_pickers_open_others_that_leave_nothing_and_the_address_restores_a_view(
    found: dict[int, dict[str, Any]],
) -> None:
    verdict, link, address = found[WIDE]["tuesday"]
    assert "Ulysses takes 1.10x" in verdict
    assert link == ""
    assert "campaign=tuesday" in address
    assert found[WIDE]["oom"] == 2
    assert found[WIDE]["entries"] == 1
    assert found[WIDE]["before"] == ["", "memory"]


def test_an_address_with_unknown_values_shows_what_it_can(found: dict[int, dict[str, Any]]) -> None:
    assert found[WIDE]["unknown"] == ["", "tokens_per_s", "TCP sockets"]


def test_csv_and_booktabs_have_what_is_shown(found: dict[int, dict[str, Any]]) -> None:
    lines = found[WIDE]["csv"].splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("line,tokens,what,model,gpus")
    latex = found[WIDE]["latex"]
    assert latex.count(r"\\") == 4
    assert r"\toprule" in latex
    assert re.search(r"zigzag ring.* & 1,024 & 2,327 \[", latex)
