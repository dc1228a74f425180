"""What software the rows on GPUs ran with, for documents."""

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from sp_bench.analysis.cells import Cell
from sp_bench.formats import whole
from sp_bench.report.table import Column, unpadded

HEADS = ("GPU", "driver", "CUDA", "cuDNN", "NCCL", "torch")
COLUMNS = (*(Column(head, itemgetter(n)) for n, head in enumerate(HEADS)), Column("rows", itemgetter(-1), whole))


def markdown(cells: Sequence[Cell]) -> str:
    """A line for each GPU and set of versions; under it what differs between rows of one line."""
    lines, kernels, warm = Counter[tuple[str, ...]](), Counter[str](), 0
    for cell in (each for each in cells if each.processor == "GPU"):
        for row in cell.measured:
            found = row["environment"]
            packages = dict(found["packages"])
            names = ", ".join(sorted(set(found["device_names"])))
            versions = (found[name] or "?" for name in ("driver", "cuda", "cudnn", "nccl"))
            lines[(names, *versions, packages["torch"])] += 1
            warm += cell.options["isolation"] == "group"
            if cell.asked["kernel"] == "flash_attn_4":
                kernels[packages["flash-attn-4"]] += 1
    versions = " and ".join(f"{name} in {whole(size)} rows" for name, size in sorted(kernels.items()))
    return (
        f"{unpadded(COLUMNS, [(*of, size) for of, size in lines.most_common()])}\n\nFlashAttention-4 is {versions}. "
        f"{whole(warm)} of {whole(lines.total())} rows are of processes that run many trials (`isolation=group`)."
    )
