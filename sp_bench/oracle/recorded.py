"""The runs on the text cut short, as a proof's record has them: later trials compare their first step with these.

Of each run a sample of tokens is kept, since a record of all would have megabytes.
"""

from collections.abc import Mapping
from typing import Any

import torch

from sp_bench.oracle.timed_step import Run, Shorter

NUM_TOKENS = 1024  # of a run's losses, over all its sequences


def recorded(shorter: Shorter) -> dict[str, Any]:
    """Plain JSON values, without the row columns."""
    return {
        "loss_budget": shorter.loss_budget,
        "worst_budget": shorter.worst_budget,
        "line": [list(step) for step in shorter.line],
        "runs": [_sample(run) for run in shorter.runs],
    }


def _sample(run: Run) -> dict[str, Any]:
    """Evenly spread tokens of those with a label, the last among them."""
    labelled = run.labelled.nonzero().flatten()
    step = -(-len(labelled) * len(run.losses) // NUM_TOKENS)
    tokens = labelled.flip(0)[:: max(step, 1)].flip(0)
    return {
        "seq_len": run.seq_len,
        "num_tokens": len(run.labelled),
        "grad_norm": run.grad_norm,
        "tokens": tokens.tolist(),
        "losses": run.losses[:, tokens].tolist(),
    }


def restored(found: Mapping[str, Any], device: torch.device) -> Shorter:
    """What `recorded` made plain; only the sampled tokens count as labelled."""
    runs = []
    for run in found["runs"]:
        tokens = torch.tensor(run["tokens"], dtype=torch.int64, device=device)
        losses = torch.zeros(len(run["losses"]), run["num_tokens"], dtype=torch.float64, device=device)
        losses[:, tokens] = torch.tensor(run["losses"], dtype=torch.float64, device=device)
        labelled = torch.zeros(run["num_tokens"], dtype=torch.bool, device=device)
        labelled[tokens] = True
        runs.append(Run(run["seq_len"], losses, labelled, run["grad_norm"]))
    line = [(loss, grad_norm) for loss, grad_norm in found["line"]]
    return Shorter(runs, found["loss_budget"], found["worst_budget"], line=line)
