"""The map of which method of attention is fastest, by heads, tokens, network and ranks."""

from tabulate import tabulate

from sp_bench.analysis import words
from sp_bench.config.shape import AttentionShape
from sp_bench.formats import GIB, MISSING, counted, span, whole
from sp_bench.predict.candidates import able_methods, campaigns, require_kernel
from sp_bench.predict.projection import Fit, Links, attention_work

MAP_RANKS = (2, 4, 8, 16, 32, 64)
MAP_TOKENS = (8192, 32768, 131072)  # a GPU
MAP_HEADS = ((32, 8), (32, 32), (64, 8))
MAP_NETWORKS = (None, 50.0, 25.0, 10.0)  # GiB/s of a GPU to other nodes; None: all GPUs on one node


def decision_map(fit: Fit, kernel: str, gpus_per_node: int) -> str:
    """The fastest method of attention, by heads, tokens a GPU, network and ranks, with its lead over the next method; a
    dash where that is within the error. Lines of dashes alone are left out, and counted below the table."""
    require_kernel(fit, kernel)
    heads = ("heads", "tokens a GPU", "to other nodes", *(f"{ranks} GPUs" for ranks in MAP_RANKS))
    lines = []
    for num_heads, num_kv_heads in MAP_HEADS:
        for tokens in MAP_TOKENS:
            for network in MAP_NETWORKS:
                links = Links(fit.inside, None if network is None else network * GIB, gpus_per_node)
                row = [f"{num_heads}/{num_kv_heads}", whole(tokens), f"{network:g} GiB/s" if network else "one node"]
                for ranks in MAP_RANKS:
                    shape = AttentionShape(1, tokens * ranks, num_heads, num_kv_heads, 128, True, "bfloat16")
                    row.append(_fastest(fit, kernel, shape, ranks, links, gpus_per_node))
                lines.append(row)
    apart = [row for row in lines if {*row[-len(MAP_RANKS) :]} != {MISSING}]
    table = f"{tabulate(apart, heads, disable_numparse=True, tablefmt='pipe')}\n\n" if apart else ""
    return (
        f"{table}A dash: no method is ahead of the next by more than {fit.band(False, 1):.0%}, the error to reckon "
        f"with. {len(lines) - len(apart)} of {len(lines)} lines have dashes alone and are left out."
    )


def _fastest(fit: Fit, kernel: str, shape: AttentionShape, ranks: int, links: Links, node: int) -> str:
    """`ring 1.20x`: the fastest method over `ranks`, `node` of them on each node; a dash if its lead is within the
    error."""
    times = {
        (method.name, degrees): fit.rates.attention_ms(attention_work(method, kernel, shape, degrees, links))
        for method, degrees in able_methods(shape, ranks, node)
        if method.name in fit.methods
    }
    ranked = sorted(times.items(), key=lambda item: item[1])
    (name, (ulysses, ring)), ms = ranked[0]
    other = next((each for (method, _), each in ranked if method != name), ms)
    shown = f"USP {ulysses}x{ring}" if name == "usp" else words.METHODS[name]
    return f"{shown} {other / ms:.2f}x" if other / ms > 1 + fit.band(False, 1) else MISSING


def evidence_of_map(fit: Fit, kernel: str) -> str:
    """Which cells of attention the map rests on."""
    cells = [cell for cell in fit.attention if cell.kernel == kernel]
    tokens, ranks = span(cell.seq_len for cell in cells), span(cell.sp_size for cell in cells)
    return (
        f"Its rates rest on {counted(len(fit.attention), 'cell')} of attention. {len(cells)} have this kernel, of "
        f"{tokens} tokens on {ranks} GPUs, from {', '.join(campaigns(cells))}."
    )
