"""Whatever row reading lets through, all that reads rows can show: no odd value of any column ends a page."""

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import sp_bench
from sp_bench import report
from sp_bench.analysis import comparison
from sp_bench.analysis.cells import cells as cells_of
from sp_bench.analysis.cells import of_equal_steps
from sp_bench.analysis.selection import select
from sp_bench.config.options import BY_COLUMN
from sp_bench.look import status
from sp_bench.predict import projection
from sp_bench.predict.fitted import of_cells, one_rank_steps
from sp_bench.report import explorer, packed_gate
from sp_bench.report.cards import cards
from sp_bench.report.caveats import caveats, statuses
from sp_bench.report.figures import FIGURES
from sp_bench.report.figures.style import Look
from sp_bench.report.findings import findings
from sp_bench.report.page import Content, render
from sp_bench.report.setting_tables import tables
from sp_bench.report.table import latex, markdown
from sp_bench.rows import consistency, flat, packed, store
from sp_bench.rows.digest import DIGEST, digests
from sp_bench.rows.names import config_leaves
from sp_bench.rows.schema import SCHEMA, SCHEMA_VERSION

from .rows import collective, hf_step, row

RESULTS = Path(__file__).parents[2] / "results"
REAL = (  # campaign: rows of it
    *(("h200x2_headline", 4), ("h200x2_engines_3", 4), ("h200x1_one_rank_held", 3), ("h200x2_longest_7", 3)),
    *(("h200x2_packed_step", 2), ("h200x2_step_memory_3", 2), ("cpu_stream", 4), ("h200x1_stream_kernels", 3)),
    *(("h200x1_one_rank_delta", 2), ("h200x1_one_rank_latent", 2), ("h200x1_one_rank_hybrid_2", 4), ("h200x1_fp8", 4)),
)
KEPT = {"schema_version", DIGEST, "cell_id", "trial_id"}  # these follow from the others
WORD, LONG = "no_such_thing", 2**62


def odd(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Null, extremes and unknown words of a column's type."""
    if pa.types.is_string(kind):
        found = st.sampled_from([WORD, "", "0", "<b>", "a\nb"])
    elif pa.types.is_boolean(kind):
        found = st.booleans()
    elif pa.types.is_integer(kind):
        found = st.sampled_from([0, 1, -1, 3, LONG, -LONG])
    elif pa.types.is_floating(kind):
        found = st.sampled_from([0.0, -1.0, 5e-324, 1.7e308, math.inf, math.nan])
    elif pa.types.is_timestamp(kind):
        found = st.sampled_from([datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)])
    elif pa.types.is_map(kind):
        found = st.lists(st.tuples(st.just(WORD), odd(kind.item_type)), max_size=1)
    elif pa.types.is_list(kind):
        found = st.lists(odd(kind.value_type), max_size=2)
    else:
        found = st.fixed_dictionaries({field.name: odd(field.type) for field in kind})
    return st.none() | found


CHANGES = st.lists(
    (st.sampled_from([*BY_COLUMN]) | st.sampled_from([name for name in SCHEMA.names if name not in KEPT])).flatmap(
        lambda name: st.tuples(st.integers(0, 99), st.just(name), odd(SCHEMA.field(name).type))
    ),
    min_size=1,
    max_size=40,
)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    made = [row(method=m, replicate=r, seq_len=n) for m in ("ring", "ulysses") for r in (0, 1) for n in (512, 1024)]
    made += [row(method="single", sp_size=1), collective("gloo", "all_to_all", 3.0)]
    made += [row(status="oom", seq_len=4096, oom_site="device"), hf_step(seq_len=4096), hf_step(seq_len=8192)]
    real = [each for name, n in REAL for each in consistency.read(RESULTS / name)[0].slice(0, n).to_pylist()]
    return [{"schema_version": SCHEMA_VERSION} | each for each in made] + real


def changed(row: Mapping[str, Any], column: str, value: Any) -> dict[str, Any]:
    """The row with another value, in its config too if it is an option's: then nothing contradicts it."""
    found = {**row, column: value}
    if (option := BY_COLUMN.get(column)) and config_leaves(row["config"]):
        *groups, name = option.path.split(".")
        tree = json.loads(row["config"])
        inside = tree
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[name] = value
        text = json.dumps(tree, sort_keys=True)
        cell_id = hashlib.sha256(text.encode()).hexdigest()[:12]
        trial_id = hashlib.sha256(f"{cell_id}/{row['replicate']}".encode()).hexdigest()[:12]
        found |= {"config": text, "cell_id": cell_id, "trial_id": trial_id}
    return found


def written(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """A campaign of these rows in a pack, each with the digest of its values."""
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
    place = SCHEMA.get_field_index(DIGEST)
    table = table.set_column(place, SCHEMA.field(place), pa.array(digests(table)))
    names = [store.RowName(*(each[name] for name in ("trial_id", "env_id", "attempt", "status"))) for each in rows]
    table = table.append_column(packed.FILE_NAME, pa.array([name.file_name for name in names]))
    folder.mkdir(parents=True)
    pq.write_table(table, folder / packed.PACK, store_schema=False)
    return folder


def shown_everywhere(folder: Path, look: Look) -> int:
    """Make all that a reader sees of a campaign, but for the files of its figures. Returns the number of its cells."""
    sp_bench.load([folder])
    selection = select([folder])
    cells = cells_of(of_equal_steps(selection.rows))
    found = report.settings(cells)
    made = tables(found)
    plots = [plot for plots in FIGURES.values() for plot in plots(found, cells, look)]
    told = caveats(cells, found, [statuses(cells)])
    render(Content(selection, cells, cards(found), told, (), made, packed_gate.gates(cells)))
    assert latex(made) or markdown(made) or not plots
    findings(found, cells)
    one_rank_steps(cells)
    for hardware in ("h200", "cpu"):
        with suppress(projection.NotProjectable):
            of_cells(cells, "", [hardware])
    explorer.html(explorer.data(found, {}), "")
    for as_text in flat.FORMATS.values():
        as_text(consistency.read(folder, flat.FLAT)[0])
    list(status.lines(status.overview(folder)))
    if cells:
        comparison.compare(folder, folder).as_json()
    return len(cells)


@pytest.mark.parametrize("odd", [{"window_ms": [5e-324, 5e-324]}, {"tokens_per_s": 1.7e308}])
def test_an_odd_row_is_read_without_a_warning(odd, tmp_path):
    folder = written([row(schema_version=SCHEMA_VERSION, **odd)], tmp_path / "odd")
    assert store.read(folder)[0].num_rows == 1


@pytest.mark.filterwarnings("ignore")
def test_options_that_no_trial_has_together_end_nothing(rows, tmp_path):
    """As rows of another version may have them: such a config is none of this version's."""
    made = [changed(each, "document_len", 3) for each in rows if config_leaves(each["config"])]
    made = [changed(changed(each, "policy", "<b>"), "ring_degree", 7) for each in made]
    assert shown_everywhere(written(made, tmp_path / "odd"), Look()) > 0


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@example(changes=[(0, "policy", "dynamic")])
@given(changes=CHANGES)
def test_rows_with_odd_values_are_shown_or_skipped_and_end_nothing(rows, changes):
    made = list(rows)
    for place, column, value in changes:
        made[place % len(made)] = changed(made[place % len(made)], column, value)
    with tempfile.TemporaryDirectory() as folder:
        assert shown_everywhere(written(made, Path(folder) / "odd"), Look()) > 0
