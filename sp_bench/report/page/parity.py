"""The section on training parity: how far the same training by a method and an engine is from one process."""

from collections.abc import Sequence

from sp_bench.config.trial import EngineConfig
from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING, number, whole
from sp_bench.report.page.parts import Line, Section, Table, ref

BASIS = "No scaling: each line is one training, and its baseline the same steps on one process without any parallelism."
HEAD = (
    *("engine", "method", "kernel", "sp_size", "data-parallel", "seq_len (tokens)", "steps"),
    *("mean NLL difference (nats)", "largest (nats)", "largest of the gradient norm (relative)"),
)
CAPTION = (
    "From equal weights on equal tokens, step by step: absolute differences of the loss a token, and relative ones of "
    "the norm of the whole gradient; of several replicates the largest."
)


def section(cells: Sequence[Cell]) -> Section | None:
    trained = [cell for cell in cells if cell.asked["workload"] == "parity" and cell.ok]
    if not trained:
        return None
    groups: dict[str, list[Cell]] = {}
    for cell in sorted(trained, key=lambda c: (c.micro_batches, _engine(c), c.asked["sp_size"], c.series)):
        words = (*(str(cell.asked[name]) for name in ("model", "dtype", "hardware")), cell.micro_batches_note)
        groups.setdefault(", ".join(filter(None, words)), []).append(cell)
    tables = tuple(Table(name, CAPTION, HEAD, tuple(map(_line, group)), (0, 1, 2)) for name, group in groups.items())
    return Section("parity", "Training parity", BASIS, tables=tables)


def _engine(cell: Cell) -> str:
    return str(cell.asked["engine"] or EngineConfig().name)


def _line(cell: Cell) -> Line:
    asked = cell.asked
    dp_size = (asked["dp_replicate_size"] or 1) * (asked["dp_shard_size"] or 1)
    texts = (
        *(ref(_engine(cell), cell), cell.series, str(asked["kernel"] or MISSING), whole(asked["sp_size"])),
        *(whole(dp_size), whole(asked["seq_len"]), whole(asked["timed_steps"])),
        *(number(cell.largest(f"{name}_difference")) for name in ("mean_nll", "max_nll", "max_grad_norm")),
    )
    return Line(texts, (cell,))
