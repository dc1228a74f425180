"""What earlier trials of a campaign have proven, so that a trial of the same key need not prove it again."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sp_bench import handover
from sp_bench.planning.plan import Trial
from sp_bench.rows import proofs
from sp_bench.rows.proofs import Proof
from sp_bench.rows.row import Outcome
from sp_bench.rows.store import RowName

ANEW_EVERY = 6  # replicates: the sixth proves itself, and so does the twelfth
COUNTED = ("comm", "counted_matmul_flops", "counted_attention_flops", "counted_parameters", "kernel_launches")
Known = Mapping[str, Proof]  # by machine


def known(trial: Trial, env_id: str, records: Sequence[Path], note: Callable[[str], None]) -> Known:
    """The proofs among the records of its cell that `trial` may rely on, if its ranks find themselves on that machine;
    none for one that proves anew. `note` is called with why a record is not among them."""
    if _is_anew(trial):
        return {}
    found, problems = proofs.read(path for path in records if path.name.split("-")[1] == env_id)
    for problem in problems:
        note(f"{problem}; its trials prove anew")
    if records and not (found or problems):
        note(f"{_named(trial)} was proven with other code or libraries; it proves anew")
    return {each.machine: each for each in found}


def _is_anew(trial: Trial) -> bool:
    """Each sixth replicate; and attention with sinks, whose gradient is in no result of the timed length. In training
    sinks are weights, whose gradients in the first step are compared with those of the trial with the proof."""
    return trial.config.workload.sinks or (trial.replicate + 1) % ANEW_EVERY == 0


def is_likely(trial: Trial, proof: str) -> bool:
    """Whether the trial will rely on the proof of an earlier replicate, if the campaign's setting `proof` lets it."""
    return proof == "auto" and trial.config.world == "ranks" and trial.replicate > 0 and not _is_anew(trial)


def relied_on(outcome: Outcome, ranks: Path, campaign: str, relied: Known) -> Outcome:
    """The outcome with the record that its ranks relied on in the column `proof`. ranks: the folder that they wrote to.

    Ranks that rely on a record which they were not given make it an `error`.
    """
    said = handover.read_proof(ranks)
    if outcome.status != "ok" or said is None or (_is_handed(said) and said["found"] is not None):
        return outcome
    if not _is_handed(said) or said["machine"] not in relied:
        reason = "the record is broken: the ranks rely on a proof that they were not given"
        return replace(outcome, status="error", reason=reason, measured={})
    name = f"{campaign}/{proofs.FOLDER}/{relied[said['machine']].file_name}"
    return replace(outcome, measured={**outcome.measured, "proof": name})


def keep(
    outcome: Outcome, ranks: Path, trial: Trial, row: RowName, folder: Path, given: Known, note: Callable[[str], None]
) -> None:
    """Write the record of what an ok trial has proven, unless the campaign `folder` has one of its key. `row` is its
    own; `given` are the records that it was given.

    Raises:
        OSError: it cannot be written.
    """
    said = handover.read_proof(ranks)
    if outcome.status != "ok" or said is None or said["found"] is None:
        return
    if given:
        note(f"{_named(trial)} was proven on other devices, drivers or settings; it proves anew")
    seconds = (outcome.phase_s or {}).get("correctness", 0.0)
    counted = {name: outcome.measured.get(name) for name in COUNTED}
    key = (trial.cell_id, row.env_id, said["machine"])
    try:
        proofs.write(Proof(*key, row.file_name, seconds, said["found"], counted), folder)
    except ValueError as error:
        note(f"the proof of {_named(trial)} is not kept: {error}")


def _is_handed(said: Any) -> bool:
    """Whether it is what honest ranks hand over: their machine, and what they proved or None."""
    match said:
        case {"machine": str(machine), "found": None | {"columns": {}}}:
            return re.fullmatch("[0-9a-f]{8}", machine) is not None
    return False


def _named(trial: Trial) -> str:
    return f"cell {trial.cell_id} ({trial.config.method.name})"
