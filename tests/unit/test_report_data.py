"""What a report reads and chooses: environments, pools, provenance, anonymity, and rows of other schemas and tools."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sp_bench.report as reports
from sp_bench import cli
from sp_bench.analysis.cells import Cell, cells
from sp_bench.analysis.metrics import tokens_per_s, tokens_per_s_per_gpu
from sp_bench.analysis.provenance import mixing, origin
from sp_bench.analysis.ratios import paired_ratio
from sp_bench.analysis.selection import MIXED, Selection, select
from sp_bench.analysis.settings import settings as settings_of
from sp_bench.report import VENUES, Look, Options, build, folder
from sp_bench.report.anonymous import anonymous
from sp_bench.report.caveats import caveats
from sp_bench.report.setting_tables import tables
from sp_bench.rows import store

from .rows import ENV_ID, ENVIRONMENT, STARTED_AT, commit, row, selection_of
from .rows import cells_of as in_memory

OTHER_ENV = "0000000f"
H200 = {"device_names": ["NVIDIA H200"] * 2, "nccl": "2.28.9", "process_group": "ProcessGroupNCCL"}


def on(name: str, *, number: int = 2, **changes: Any) -> dict[str, Any]:
    return ENVIRONMENT | {"device_names": [name] * number} | changes


def cells_of(*folders: Path, mix: bool = False) -> list[Cell]:
    return cells(select(folders, mix=mix).rows)


@pytest.fixture
def two_environments(tmp_path: Path) -> list[Path]:
    """The same cells, six replicates each, on a monday and, with another environment and slower, on a tuesday."""
    made = []
    for name, env_id, times in (("monday", ENV_ID, (10.0, 12.0)), ("tuesday", OTHER_ENV, (20.0, 24.0))):
        methods = (("ring", times[0]), ("ulysses", times[1]))
        rows = [
            row(method=method, ring_degree=2, env_id=env_id, median_ms=ms + r, replicate=r)
            for method, ms in methods
            for r in range(6)
        ]
        made.append(commit(rows, tmp_path / name))
    return made


def test_of_a_cell_within_one_campaign_the_newest_environment_counts_and_older_ones_are_named(tmp_path: Path) -> None:
    later = STARTED_AT + timedelta(days=1)
    rows = [row(median_ms=1.0, replicate=r) for r in range(3)]
    rows += [row(median_ms=5.0, env_id=OTHER_ENV, started_at=later), row(median_ms=2.0, seq_len=2048)]
    selection = select([commit(rows, tmp_path)])
    assert {(c.asked["seq_len"], c.median_step_ms) for c in cells(selection.rows)} == {(1024, 5.0), (2048, 2.0)}
    assert selection.left_out == {ENV_ID: 3}
    assert selection.core_ids == (OTHER_ENV, ENV_ID)


def test_rows_of_an_edited_method_pair_with_those_of_the_others(tmp_path: Path) -> None:
    """Its env_id is new, that of the others is not: the code that they share is the same."""
    edited = {"env_id": OTHER_ENV, "core_id": "c0c0c0c0"}
    next_day = [STARTED_AT + timedelta(days=1, seconds=r) for r in range(6)]
    rows = [row(median_ms=10.0 + r, replicate=r, core_id="c0c0c0c0", method="ulysses") for r in range(6)]
    rows += [row(median_ms=9.0, replicate=r) for r in range(6)]  # measured before the edit, and before core_id
    rows += [row(median_ms=20.0 + 2 * r, replicate=r, started_at=at, **edited) for r, at in enumerate(next_day)]
    selection = select([commit(rows, tmp_path)])
    ring, ulysses = sorted(cells(selection.rows), key=lambda cell: cell.rows[0]["method"])
    paired = paired_ratio(ring, ulysses)
    assert paired is not None
    assert (paired.ratio, paired.pairs) == (2.0, 6)
    assert selection.left_out == {ENV_ID: 6}


def test_of_two_campaigns_between_which_a_method_was_edited_its_newest_code_counts(tmp_path: Path) -> None:
    """Rows of its old code and its new code are no replicates of each other, although their environment is one."""
    next_day = [STARTED_AT + timedelta(days=1, seconds=r) for r in range(2)]
    later = {"env_id": OTHER_ENV, "core_id": "c0c0c0c0"}
    others = [row(method="ulysses", core_id="c0c0c0c0", replicate=r) for r in range(2)]
    monday = [row(median_ms=1.0, core_id="c0c0c0c0", replicate=r) for r in range(2)]
    tuesday = [row(median_ms=5.0, replicate=r, started_at=at, **later) for r, at in enumerate(next_day)]
    folders = [commit([*others, *monday], tmp_path / "monday"), commit(tuesday, tmp_path / "tuesday")]
    for mix in (False, True):
        selection = select(folders, mix=mix)
        assert {(c.asked["method"], c.median_step_ms) for c in cells(selection.rows)} == {
            ("ring", 5.0),
            ("ulysses", 10.0),
        }
        assert selection.left_out == {"c0c0c0c0": 2}


def test_the_newest_environment_is_that_of_the_cell_and_not_of_the_campaign(tmp_path: Path) -> None:
    rows = [row(env_id=OTHER_ENV, started_at=None), row(), row(seq_len=2048, env_id="ffffffff", started_at=None)]
    selection = select([commit(rows, tmp_path)])
    assert sorted(selection.rows["env_id"]) == [ENV_ID, "ffffffff"]


def test_an_environment_that_only_refused_a_cell_does_not_stand_before_one_that_ran_it(tmp_path: Path) -> None:
    ran = row(env_id="a" * 8, started_at=STARTED_AT)
    refused = row(
        env_id="b" * 8, started_at=STARTED_AT + timedelta(days=1), status="unsupported", reason="no driver here"
    )
    folder = commit([ran, refused], tmp_path / "c")
    assert select([folder]).core_ids == ("a" * 8,)
    assert select([folder]).left_out == {"b" * 8: 1}
    assert select([commit([refused], tmp_path / "alone")]).core_ids == ("b" * 8,)


def test_a_copy_of_a_campaign_adds_no_replicates_and_is_named(tmp_path: Path) -> None:
    rows = [row(replicate=n, started_at=STARTED_AT + timedelta(minutes=n)) for n in range(6)]
    again = [{**rows[0], "started_at": STARTED_AT + timedelta(days=1)}]
    first, copy, later = (commit(r, tmp_path / n) for n, r in (("a", rows), ("b", rows), ("c", again)))
    (cell,) = cells_of(first, copy)
    assert len(cell.step_ms) == 6
    assert select([first, copy]).problems == ("b: 6 rows of another folder again; each counts once",)
    (cell,) = cells_of(first, later)
    assert len(cell.step_ms) == 7


def test_environments_of_one_setting_are_settings_of_their_own_and_say_which(two_environments: list[Path]) -> None:
    found = cells_of(*two_environments)
    assert {c.setting.rpartition("; ")[2] for c in found} == {f"env {ENV_ID}", f"env {OTHER_ENV}"}
    assert all(c.over_fabrics.endswith(c.pool) for c in found)
    assert len({c.cell_id for c in found}) == 4
    made = settings_of(found)
    assert sorted(setting.campaigns for setting in made) == [["monday"], ["tuesday"]]
    assert all(setting.title.endswith(setting.campaigns[0]) for setting in made)
    assert all(len(table.lines) == 2 for table in tables(made))


def test_one_environment_is_not_in_any_name(two_environments: list[Path]) -> None:
    assert not any("env" in c.setting for c in cells_of(two_environments[0]))


def test_mixed_environments_share_cells_and_every_provenance_says_so(two_environments: list[Path]) -> None:
    selection = select(two_environments, mix=True)
    found = cells(selection.rows)
    assert [len(c.step_ms) for c in found] == [12, 12]
    assert {c.pool for c in found} == {MIXED}
    assert set(selection.rows["pool"]) == {MIXED}
    said = "rows of 2 core_ids are mixed (--mix)"
    assert said in origin(found)
    assert said in " ".join(caveats(found, settings_of(found), [])).lower()
    assert mixing(cells_of(*two_environments)) == ""
    assert mixing(cells_of(two_environments[0], mix=True)) == ""


def test_paired_ratios_pair_replicates_of_equal_environment_and_campaign_mixed_or_not(tmp_path: Path) -> None:
    ring = [row(median_ms=10.0, replicate=r) for r in range(6)]
    ulysses = [row(method="ulysses", median_ms=5.0, replicate=r, env_id=OTHER_ENV) for r in range(6)]
    same = [row(method="ulysses", median_ms=20.0, replicate=r) for r in range(6)]
    apart = [commit(ring, tmp_path / "a"), commit(ulysses, tmp_path / "b")]
    over, under = cells_of(*apart, mix=True)
    assert paired_ratio(over, under) is None
    other_campaign = [apart[0], commit(same, tmp_path / "c")]
    assert paired_ratio(*cells_of(*other_campaign)) is None
    over, under = cells_of(commit(same, apart[0]), apart[1], mix=True)
    ratio = paired_ratio(under, over)
    assert ratio is not None
    assert (ratio.pairs, ratio.ratio) == (6, 2.0)


def test_device_models_are_never_pooled_even_under_one_env_id(tmp_path: Path) -> None:
    environments = (on("NVIDIA H200"), on("NVIDIA H200 NVL", number=4), None)
    rows = [row(replicate=r, environment=environment) for r, environment in enumerate(environments)]
    found = cells_of(commit(rows, tmp_path))
    assert sorted(c.setting.rpartition("; ")[2] for c in found) == [
        f"env {ENV_ID} on NVIDIA H200",
        f"env {ENV_ID} on NVIDIA H200 NVL",
        f"env {ENV_ID} on an unknown device",
    ]


def test_a_failure_without_a_record_of_its_device_stays_with_its_cell(tmp_path: Path) -> None:
    rows = [row(environment=on("NVIDIA H200")), row(status="error", environment=None, replicate=1)]
    (cell,) = cells_of(commit(rows, tmp_path))
    assert cell.statuses == ["error", "ok"]


STEP = {"workload": "train_step", "pass_kind": "step"}


def test_engines_never_share_a_setting(tmp_path: Path) -> None:
    engines = ('{"engine": "torchtitan"}', '{"engine": {"name": "megatron", "options": {}}}', '{"engine": "plain"}')
    found = cells_of(commit([row(**STEP, config=engine) for engine in engines], tmp_path))
    assert len({c.setting for c in found}) == 3
    assert any(", engine megatron, " in c.setting for c in found)


def test_the_engine_that_a_config_leaves_out_has_its_name(tmp_path: Path) -> None:
    engines = ("{}", '{"engine": {"name": "deepspeed"}}')
    found = cells_of(commit([row(**STEP, config=engine) for engine in engines], tmp_path))
    assert sorted(re.findall(r"engine \w+", "; ".join(c.setting for c in found))) == [
        "engine deepspeed",
        "engine fsdp2",
    ]


def test_a_setting_that_trains_says_what_runs_the_model_and_what_saves_memory(tmp_path: Path) -> None:
    options = {"activation_checkpointing": "full", "loss_tile_tokens": 2048}
    rows = [row(**STEP, config=json.dumps({"workload": {"name": "train_step", **saved}})) for saved in ({}, options)]
    whole, saving = sorted(c.setting for c in cells_of(commit(rows, tmp_path)))[::-1]
    assert "batch 1, engine fsdp2, full activation checkpointing, loss_tile_tokens=2048, " in saving
    assert "checkpointing" not in whole
    assert "tokens at a time" not in whole


def test_kernels_of_a_library_never_share_a_line_even_on_different_numbers_of_ranks(tmp_path: Path) -> None:
    library = {"method": "ring_flash_attn", "implementation": "ring-flash-attn==0.1.8"}
    rows = [row(kernel="flash_attn", sp_size=2, **library), row(kernel="flash_attn_4", sp_size=4, **library)]
    assert len({c.series for c in cells_of(commit(rows, tmp_path))}) == 2


def test_versions_of_a_library_never_share_a_line(tmp_path: Path) -> None:
    rows = [row(method="ring_flash_attn", implementation=f"ring-flash-attn==0.1.{n}", sp_size=n) for n in (2, 4)]
    assert len({c.series for c in cells_of(commit(rows, tmp_path))}) == 2


@pytest.mark.parametrize("odd", [{"compute_only_step_ms": []}, {"comm_only_step_ms": []}, {"inner_ring_degree": 0}])
def test_a_row_without_samples_or_with_rings_of_no_rank_has_its_place_on_the_page(
    tmp_path: Path, monkeypatch, odd
) -> None:
    monkeypatch.setattr(reports, "draw", lambda *arguments: [])
    rows = [row(method="double_ring", config=None, **odd), row(method="ulysses", ulysses_degree=2, ring_degree=1)]
    monkeypatch.setattr(reports, "select", lambda *arguments, **options: selection_of(rows))
    assert build([commit(rows, tmp_path / "c")], tmp_path / "page").page.exists()


def test_provenance_says_where_numbers_come_from_in_one_sentence(tmp_path: Path) -> None:
    packages = [("torch", "2.13.0"), ("flash-attn-4", "4.0"), ("deepspeed", "0.19"), ("numpy", "2.5")]
    environment = ENVIRONMENT | H200 | {"packages": packages}
    rows = [
        row(kernel="flash_attn_4", environment=environment, replicate=r, git_dirty=r == 5, seq_len=n)
        for n in (1024, 2048)
        for r in range(6 if n == 1024 else 3)
    ]
    rows.append(row(kernel="flash_attn_4", environment=environment, seq_len=4096, status="oom"))
    assert origin(cells_of(commit(rows, tmp_path / "night"))) == (
        "night: 10 rows (9 ok, 1 oom), 3 to 6 replicates a cell; median over replicates of their median steps, "
        "order-statistic intervals of coverage 96.9%, none below 6 replicates; "
        "git 0123456, 0123456 with uncommitted changes; 2 x NVIDIA H200; "
        f"torch 2.13.0, flash-attn-4 4.0, NCCL 2.28.9; core_id {ENV_ID}."
    )


def test_provenance_of_failures_and_of_rows_without_a_record_says_only_what_is_known(tmp_path: Path) -> None:
    rows = [row(status="unsupported", environment=None, git_sha=None, git_dirty=None)]
    assert origin(cells_of(commit(rows, tmp_path / "night"))) == (
        f"night: 1 row (1 unsupported), none measured; core_id {ENV_ID}."
    )
    assert origin([]) == ""


SECRETS = (
    *("node17", "example-lab", "alice", "bob.smith", "GPU-5f0c1b7e", "5f0c1b7e-1111-2222-3333-444455556666"),
    *("/home/", "/scratch/", "secret_project", "10.11.12.13", "fe80::1ff:fe23", "C:\\Users", "carol"),
    *("0123456789abcdef", "0123456", "mlx5_alice", "private checkpoint"),
)
REASON = (
    "worker on node17.example-lab.edu died: File '/home/alice/private checkpoint/run.py', line 3; see "
    "~bob.smith/notes, C:\\Users\\carol\\x.txt, -I/scratch/secret_project/include, mail bob.smith@example-lab.edu, "
    "tcp://10.11.12.13:29500, peer 10.11.12.13:4000, [fe80::1ff:fe23%eth0]:29500, "
    "device GPU-5f0c1b7e-1111-2222-3333-444455556666 at 0123456789abcdef0123456789abcdef01234567, "
    "short 0123456; 3 tokens/s, forward/backward, ratio 1.5 / 2, cudnn 9.19"
)
REVEALING = {
    "hostname": "node17.example-lab.edu",
    "python": "3.12.3",
    "packages": [("torch", "2.13.0"), ("nvidia-cudnn-cu13", "9.19.0.56")],
    "device_names": ["NVIDIA H200", "NVIDIA H200"],
    "device_uuids": ["5f0c1b7e-1111-2222-3333-444455556666"] * 2,
    "cpu": "a CPU of node17",
    "process_group": "gloo",
    "env": [("NCCL_TOPO_FILE", "/scratch/secret_project/topo.xml"), ("NCCL_IB_HCA", "mlx5_alice"), ("USER", "alice")],
    "topology": "GPU0 NV18 on node17 as listed in /scratch/secret_project/topo",
}


def revealing_rows() -> list[dict[str, Any]]:
    config = json.dumps(
        {"hardware": {"device": "cpu"}, "model": {"checkpoint": "/scratch/secret_project/a", "owner": "alice"}}
    )
    asked = {"config": config, "environment": REVEALING, "model": "alice_8b", "seq_len": 1024}
    names = {
        "implementation": "lib==1 from /home/alice/lib",
        "fabric": "node17 sockets",
        "flags": ["see /home/alice/x"],
    }
    rows = [row(method=m, replicate=r, **asked, **names) for m in ("ring", "/home/alice/ring") for r in range(2)]
    rows.append(row(**asked | {"seq_len": 4096}, status="error", reason=REASON))
    return [*rows, row(**asked | {"seq_len": 8192}, status="oom", oom_site="torch on node17", reason=REASON)]


@pytest.fixture(scope="module")
def revealing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("results") / "home" / "alice"
    campaign = commit(revealing_rows(), home / "alice_on_node17")
    (campaign / "notes of alice.txt").write_text("mine")
    return campaign


def readable(path: Path) -> str:
    """All that a file holds, streams of a PDF decompressed."""
    content = path.read_bytes()
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", content, re.DOTALL) if path.suffix == ".pdf" else ():
        try:
            content += zlib.decompress(stream)
        except zlib.error:  # not every stream is compressed
            content += stream
    return content.decode("utf-8", "replace")


def found_in(files: Mapping[str, str], secrets: Sequence[str]) -> set[tuple[str, str]]:
    return {(name, secret) for name, text in files.items() for secret in secrets if secret.lower() in text.lower()}


def test_no_file_of_an_anonymous_report_holds_a_host_user_uuid_path_address_or_commit(
    revealing: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page"
    built = build([revealing], out, Options(anonymous=True))
    files = {p.relative_to(out).as_posix(): readable(p) for p in out.rglob("*") if p.is_file()}
    assert {Path(name).suffix for name in files} >= {".html", ".pdf", ".png", ".csv", ".tex", ".md", ".json"}
    assert found_in(files, SECRETS) == set()
    assert found_in({"printed": " ".join(built.problems)}, SECRETS) == set()
    page = files["index.html"]
    assert "3 tokens/s, forward/backward" not in page
    assert all(kept in page for kept in ("NVIDIA H200", "nvidia-cudnn-cu13 9.19.0.56", "campaign 1"))


def test_without_it_the_page_says_them(revealing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "draw", lambda *arguments: [])
    page = readable(build([revealing], tmp_path / "page").page)
    shown = {secret for _, secret in found_in({"page": page}, SECRETS)}
    assert shown >= {*SECRETS} - {"/home/", "0123456789abcdef", "mlx5_alice"}
    assert "mlx5_alice" not in shown  # of such a variable, a hash


def test_anonymous_rows_are_as_many_and_measure_the_same(revealing: Path) -> None:
    open_rows = select([revealing])
    hidden = anonymous(open_rows)
    columns = ["num_layers", "micro_batches", "seq_len"]  # whole numbers, which JSON takes
    assert list(hidden.rows[columns].dtypes) == list(open_rows.rows[columns].dtypes)
    before, after = cells(open_rows.rows), cells(hidden.rows)
    assert sorted(c.median_step_ms or 0 for c in before) == sorted(c.median_step_ms or 0 for c in after)
    assert len({c.series for c in after}) == len({c.series for c in before})


def test_a_setting_says_over_how_many_nodes_its_ranks_lie(tmp_path: Path) -> None:
    rows = [row(sp_size=4), row(sp_size=4, num_nodes=2)]
    one, two = sorted((cell.name.setting for cell in cells_of(commit(rows, tmp_path / "c"))), key=len)
    assert "nodes" not in one
    assert "over 2 nodes" in two


def test_no_host_of_a_trial_over_several_is_named_in_anonymous_rows(tmp_path: Path) -> None:
    hosts = [REVEALING, {**REVEALING, "hostname": "blade99"}]
    told = row(status="error", reason="rank 3 on blade99 said so", node_environments=hosts)
    hidden = anonymous(select([commit([told], tmp_path / "c")])).rows
    text = str(hidden[["reason", "node_environments"]].to_dict())
    assert "blade99" not in text
    assert found_in({"rows": text}, ("node17", "5f0c1b7e")) == set()


def test_anonymous_campaigns_with_equal_names_stay_apart(tmp_path: Path) -> None:
    folders = [commit([row(median_ms=ms)], tmp_path / "home" / who / "runs") for who, ms in (("al", 1.0), ("bo", 2.0))]
    rows = [row(status="error", reason=f"/home/{who}/x", seq_len=2048) for who in ("al", "bo")]
    commit(rows[:1], folders[0])
    commit(rows[1:], folders[1])
    hidden = anonymous(select(folders)).rows
    assert set(hidden["folder"]) == {"campaign 1", "campaign 2"}


@pytest.mark.parametrize("group", ["model", "fabric", "hardware", "link", "engine"])
def test_names_of_this_package_stay_in_anonymous_rows(group: str, one_row: Selection) -> None:
    files = sorted((Path(__file__).parents[2] / "conf" / group).glob("*.yaml"))
    config = {"link": {"inside": {"all_gather 8": "0:25 234881024:674.9"}}}
    for file in files:
        text = json.dumps(config | {group: {"name": file.stem}}, sort_keys=True, separators=(",", ":"))
        hidden = anonymous(replace(one_row, rows=one_row.rows.assign(config=text)))
        assert list(hidden.rows["config"]) == [text]


@pytest.fixture(scope="module")
def one_row(tmp_path_factory: pytest.TempPathFactory) -> Selection:
    return select([commit([row()], tmp_path_factory.mktemp("rows"))])


@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), min_size=8, max_size=60))
@example("/home/alice/x")
@example("000 step")  # a word of ours is no library, so nothing behind it is a version
@settings(max_examples=50)
def test_no_text_of_a_row_from_outside_is_in_anonymous_rows(one_row: Selection, text: str) -> None:
    text = f"x{text}"  # a number alone is no secret
    planted = {"reason": text, "config": json.dumps({"note": text}), "model": text, "implementation": f"{text}=={text}"}
    rows = one_row.rows.assign(**planted)
    hidden = anonymous(replace(one_row, rows=rows, problems=(text,)))
    assert not any(text in str(value) for name in planted for value in hidden.rows[name])
    assert hidden.problems == ("1 problem",)


@pytest.mark.parametrize("depth", [20, 900, 100_000])
@pytest.mark.parametrize("opening", ['{"user":', "["])
@pytest.mark.parametrize("hide", [False, True])
def test_a_config_nested_deeper_than_python_calls_is_a_row_all_the_same(
    depth: int, opening: str, hide: bool, tmp_path: Path
) -> None:
    closing = "}" if opening[0] == "{" else "]"
    nested = f'{{"method":{opening * depth}"/home/mallory/x"{closing * depth}}}'
    selection = select([commit([row(), row(config=nested, seq_len=4096)], tmp_path)])
    if hide:
        selection = anonymous(selection)
        assert not any("mallory" in text for text in map(str, selection.rows["config"]))
    assert len(cells(selection.rows)) == 2


def other_file(folder: Path, digit: str, **columns: Any) -> Path:
    """A file with a row's name and these columns alone."""
    identity = {"status": "ok", "trial_id": digit * 12, "env_id": ENV_ID, "attempt": 0, "schema_version": 1}
    path = folder / f"{digit * 12}-{ENV_ID}-0-{(identity | columns)['status'] or 'ok'}.parquet"
    pq.write_table(pa.table({name: pa.array([value]) for name, value in (identity | columns).items()}), path)
    return path


def test_whatever_is_no_row_of_ours_is_named_and_skipped(tmp_path: Path) -> None:
    commit([row()], tmp_path)
    other_file(tmp_path, "1", median_step_ms="fast")  # wrong type
    other_file(tmp_path, "2", comm="none")
    other_file(tmp_path, "3", seq_len=10.5)
    (tmp_path / f"{'4' * 12}-{ENV_ID}-0-ok.parquet").write_bytes(b"")
    whole = other_file(tmp_path, "5").read_bytes()
    (tmp_path / f"{'5' * 12}-{ENV_ID}-0-ok.parquet").write_bytes(whole[: len(whole) // 2])
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / f"{'6' * 12}-{ENV_ID}-0-ok.parquet")  # another tool's
    (tmp_path / f"{'7' * 12}-{ENV_ID}-0-ok.parquet").mkdir()
    invalid = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    table = pq.read_table(other_file(tmp_path, "8")).append_column("reason", invalid)
    pq.write_table(table, tmp_path / f"{'8' * 12}-{ENV_ID}-0-ok.parquet")
    (tmp_path / "notes.txt").write_text("mine")
    selection = select([tmp_path])
    assert len(cells(selection.rows)) == 1
    named = {problem.split(": ")[1][:1] for problem in selection.problems}
    assert named == {*"12345678", "n"}
    assert all(problem.endswith("; skipped") for problem in selection.problems)


def test_rows_of_an_older_schema_lack_columns_and_are_kept(tmp_path: Path) -> None:
    old = {name: value for name, value in row(median_ms=3.0).items() if name not in ("identity_error", "git_dirty")}
    schema = pa.schema([store.SCHEMA.field(name) for name in (*old, "schema_version")])
    name = store.RowName(*(old[column] for column in ("trial_id", "env_id", "attempt", "status"))).file_name
    pq.write_table(pa.Table.from_pylist([old | {"schema_version": 1}], schema), tmp_path / name)
    other_file(tmp_path, "b", status="error", reason="why")
    measured, failed = sorted(cells_of(tmp_path), key=lambda cell: cell.statuses, reverse=True)
    assert measured.median_step_ms == 3.0
    assert failed.statuses == ["error"]
    assert "none measured" not in origin([measured])


def test_rows_of_a_newer_schema_are_named_and_skipped(tmp_path: Path) -> None:
    commit([row()], tmp_path)
    other_file(tmp_path, "a", schema_version=9, status="throttled", reason="hot", novelty=1, more=[{"deep": 2}])
    selection = select([tmp_path])
    columns, version = selection.problems
    assert "novelty" in columns
    assert "more" in columns
    assert "schema_version=9; this version of sp_bench reads 1 to" in version
    assert list(selection.rows["status"]) == ["ok"]


@pytest.mark.parametrize("ms", [0.0, -5.0, float("nan"), float("inf"), None])
def test_a_row_with_a_time_that_is_none_is_named_and_skipped(tmp_path: Path, ms: float | None) -> None:
    selection = select([commit([row() | {"median_step_ms": ms}], tmp_path)])
    assert selection.rows.empty
    assert "median_step_ms" in selection.problems[0]
    (cell,) = in_memory([row() | {"median_step_ms": ms}])
    assert (cell.ok, cell.step_ms, cell.interval_ms) == (False, {}, None)


def test_a_row_on_no_ranks_has_no_rate_per_rank() -> None:
    (cell,) = in_memory([row() | {"world_size": 0}])
    assert tokens_per_s_per_gpu(cell) is None
    assert tokens_per_s(cell) is not None


def test_rows_are_the_same_whether_one_process_reads_them_or_several(tmp_path: Path, monkeypatch) -> None:
    from concurrent.futures import ThreadPoolExecutor  # in place of processes, which would import all of this

    commit([row(replicate=r) for r in range(7)], tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    alone, problems = store.read(tmp_path)
    monkeypatch.setattr(store, "PART", 3)
    heard: list[int] = []
    with ThreadPoolExecutor(2) as executor:
        shared, same_problems = store.read(tmp_path, executor=executor, progress=heard.append)
    assert (shared.combine_chunks(), same_problems) == (alone.combine_chunks(), problems)
    assert sum(heard) == 8


def test_a_second_report_removes_what_only_the_first_had_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "page"
    folder.write(out, {"figures/a.png": b"1", "figures/b.png": b"2", "tables/t.md": b"3", "index.html": b"4"})
    (out / "figures" / "mine.png").write_bytes(b"kept")
    folder.write(out, {"figures/b.png": b"5", "index.html": b"6"})
    kept = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert kept.pop(folder.MANIFEST).decode().splitlines() == ["figures/b.png", "index.html"]
    assert kept == {"figures/mine.png": b"kept", "figures/b.png": b"5", "index.html": b"6"}
    assert not (out / "tables").exists()


def test_an_interrupted_report_leaves_no_half_file_and_is_cleaned_up_by_the_next(tmp_path: Path, monkeypatch) -> None:
    out, replace = tmp_path / "page", folder.os.replace

    def interrupted(source: Path, target: Path) -> None:
        if target.name == "b.png":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(folder.os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            folder.write(out, {"a.png": b"1", "b.png": b"2", "index.html": b"3"})
    assert sorted(p.name for p in out.iterdir()) == [folder.MANIFEST, "a.png"]
    folder.write(out, {"index.html": b"4"})
    assert sorted(p.name for p in out.iterdir()) == [folder.MANIFEST, "index.html"]


def test_a_page_that_no_report_made_is_not_replaced(tmp_path: Path) -> None:
    campaign, out = commit([row()], tmp_path / "c"), tmp_path / "paper"
    build([campaign], out)
    assert folder.obstacle(out, [campaign]) is None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("mine")
    assert "has files that no report made, such as index.html" in str(folder.obstacle(tmp_path / "mine", [campaign]))


def test_a_manifest_that_leads_out_of_the_folder_removes_nothing_there(tmp_path: Path) -> None:
    precious, out = tmp_path / "precious.txt", tmp_path / "page"
    precious.write_text("kept")
    folder.write(out, {"index.html": b"1"})
    (out / folder.MANIFEST).write_text(f"../precious.txt\n{precious}\n\nindex.html\n")
    folder.write(out, {"index.html": b"2"})
    assert precious.read_text() == "kept"


def test_a_folder_of_campaigns_is_no_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reports, "build", lambda *arguments, **options: pytest.fail("worked"))
    for name in ("night", "day"):
        commit([row()], tmp_path / name)
    code, said = run(monkeypatch, capsys, "report", str(tmp_path))
    assert code == 2
    assert said.split()[1:] == f"{tmp_path} holds campaigns, not rows: name one or more of day, night".split()


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    monkeypatch.setattr("sys.argv", ["sp-bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("{rows}", "--venue", "nips"), f"--venue nips is not known; use one of {', '.join(VENUES)}"),
        (
            ("{rows}", "--only", "winners"),
            "--only winners is no figure; use one of throughput, ratios, steps, memory, bytes, fabrics",
        ),
        (("{rows}", "--export", "xlsx"), "--export xlsx is not known; use one of csv, json"),
        (("{rows}", "nowhere"), "nowhere is not a folder of results"),
        (
            ("{rows}", "--line", "a: method=ring", "--findings", "f.md"),
            "--line and --findings: one of these at a time; run it once for each",
        ),
        (
            ("{rows}", "--explore", "e.html", "--mix", "only.method=ring"),
            "--explore with --mix, only.: --explore takes --anonymous, --smallest",
        ),
        (("{rows}", "--history", "--mix"), "--history with --mix: --history takes only."),
        (("{rows}", "--render", "docs", "--out", "d"), "--render with --out: --render takes no other option"),
        (("{rows}", "--link", "l.yaml", "only.sp_size=2"), "--link with only.: --link takes no other option"),
        (
            ("{rows}", "only.method=ring", "only.method=ulysses"),
            "only.method=ring only.method=ulysses: only.method is given 2 times; use only.method=ring,ulysses",
        ),
        (
            ("{rows}", "--line", "a: sp_size=2 sp_size=4"),
            "--line a: sp_size=2 --line a: sp_size=4: --line a: sp_size is given 2 times; use --line a: sp_size=2,4",
        ),
        (("{rows}/file",), "{rows}/file is not a folder of results"),
        (("{rows}", "--out", "{rows}/page"), "--out {rows}/page lies among the rows of rows; use another folder"),
        (("{rows}", "--out", "{rows}"), "--out {rows} lies among the rows of rows; use another folder"),
        (("{rows}", "--out", "{other}/page"), "--out {other}/page cannot be made: other is not a folder"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.setattr(reports, "build", lambda *arguments, **options: pytest.fail("worked"))
    rows, other = commit([], tmp_path / "rows"), tmp_path / "other"
    for file in (rows / "file", other):
        file.write_text("in the way")
    said = run(monkeypatch, capsys, "report", *(a.format(rows=rows, other=other) for a in arguments))
    assert said[0] == 2
    assert said[1].startswith(f"sp-bench: {line.format(rows=rows, other=other)}")
    assert said[1].count("\n") == 1


def test_the_options_of_the_command_reach_the_report(tmp_path: Path, monkeypatch, capsys) -> None:
    asked = []

    def built(folders, out, options, *, executor, say):
        asked.append((folders, out, options, executor))
        return reports.ReportResult(out / "index.html", tuple(f"file {i}" for i in range(30)))

    monkeypatch.setattr(reports, "build", built)
    rows, out = commit([row()], tmp_path / "rows"), tmp_path / "page"
    monkeypatch.setattr(
        "sys.argv",
        f"sp-bench report {rows} --out {out} --venue mlsys --column 1 --height 2 --only memory --smallest 0.05 "
        "--anonymous --mix".split(),
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    options = Options(Look(1, 2.0, "mlsys"), ("memory",), 0.05, anonymous=True, mix=True)
    assert asked == [([rows], out, options, None)]
    assert "10 further files are named on the page" in capsys.readouterr().out
