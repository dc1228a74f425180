"""How fast: attention TFLOP/s, or tokens/s of a training step, a GPU."""

from collections.abc import Callable, Sequence

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.metrics import attention_tflops, tokens_per_s_per_gpu
from sp_bench.analysis.settings import Setting
from sp_bench.report.figures.panels import dots, over_length, panels, shared_title
from sp_bench.report.figures.style import Look, Plot

CAPTION = "Throughput a {ranks}. Colour: what travels; marker: the method; star: the kernel alone."
OF_LINES = " A dotted line falls to the shortest sequence that was out of memory."
OF_DOTS = " Bars: intervals over 6 replicates or more. The axis does not begin at zero."


def draw(settings: Sequence[Setting], look: Look) -> list[Plot]:
    plots = []
    for trains in (False, True):
        group = [s for s in settings if (s.cells[0].asked["workload"] == "train_step") is trains]
        if not group:
            continue
        value = _thousand_tokens if trains else _tflops
        ranks = group[0].cells[0].processor
        label = f"1,000 tokens/s a {ranks}" if trains else f"TFLOP/s a {ranks}"
        found, caption = panels(group, value), shared_title(group) + CAPTION.format(ranks=ranks)
        fell = OF_LINES if any(panel.edges for panel in found) else ""
        made = over_length("throughput", found, value, label, look, caption + fell)
        made += dots(
            "throughput", found, [(label, value)], label, look, caption + OF_DOTS, lambda c, v=value: _interval(c, v)
        )
        suffix = "train_step" if trains else "attention"
        plots += [Plot(p.name, f"{suffix}-{p.part}", p.figure, p.caption, p.data) for p in made]
    return plots


def _tflops(cell: Cell) -> float | None:
    """TFLOP/s per GPU; None on a CPU."""
    return attention_tflops(cell) if cell.processor == "GPU" else None


def _thousand_tokens(cell: Cell) -> float | None:
    rate = tokens_per_s_per_gpu(cell)
    return None if rate is None or cell.processor != "GPU" else rate / 1e3


def _interval(cell: Cell, value: Callable[[Cell], float | None]) -> tuple[float, float] | None:
    """The interval of a rate: from the rate at the longest time to that at the shortest."""
    middle = value(cell)
    if cell.interval_ms is None or middle is None or cell.median_step_ms is None:
        return None
    work = middle * cell.median_step_ms
    return work / cell.interval_ms.high, work / cell.interval_ms.low
