"""What honest ranks hand over, for tests that launch none."""

from typing import Any

from sp_bench.config.trial import TrialConfig
from sp_bench.costs import message_sizes
from sp_bench.driver.derived import predicted_bytes
from sp_bench.methods import closed_forms
from sp_bench.planning import plan

ERRORS = dict.fromkeys(("output", "dq", "dk", "dv"), 1e-7)
STEP_MS = 1.5
OF_ATTENTION = {
    "correctness_seq_len": 64,
    **{f"rel_error_{name}": error for name, error in ERRORS.items()},
    "error_budget": ERRORS,
    "kernel_rel_error": ERRORS,
    "sampled_rel_error": 1e-7,
    "sampled_grad_error": {name: error for name, error in ERRORS.items() if name != "output"},
    "identity_error": dict.fromkeys(("sum_dv", "sum_dk", "q_dq", "v_dv"), 1e-7),
}
_UPDATE = {"parameter": "norm.weight", "error": 1.0, "budget": 4.0}
PROOFS = {  # what ranks hand over of their correctness, by workload
    "attention": OF_ATTENTION | {"timed_rel_error": {"output": 1e-7, "dq": 1e-7}},
    "train_step": OF_ATTENTION
    | dict.fromkeys(("rel_error_loss", "rel_error_grad_norm", "timed_loss_error", "timed_max_loss_error"), 1e-7)
    | dict.fromkeys(("full_update_error", "last_update_error"), _UPDATE)
    | {"full_loss_error": 1e-7, "line_error": 1e-3, "fall_error": 1e-4, "fall_budget": 1e-3},
    "parity": dict.fromkeys(("max_nll_difference", "mean_nll_difference", "max_grad_norm_difference"), 1e-9),
    "stream": dict.fromkeys(("max_nll_difference", "mean_nll_difference", "max_grad_norm_difference"), 1e-9),
    "collective": {},
}


def record_of(config: TrialConfig, step_ms: float = STEP_MS) -> dict[str, Any]:
    """The record of a trial on CPUs that ended well, all of whose steps took as long on every rank."""
    workload, ranks = config.workload, config.world_size
    padded_len = plan.resolve(config).padded_seq_len
    sent = predicted_bytes(config, padded_len) or 0.0
    sizes = message_sizes.message_sizes(config)
    losses = workload.timed_steps + (workload.warmup_steps if workload.name == "parity" else 0)
    trained = {"loss": [5.0 - 0.1 * step for step in range(losses)], "grad_norm": [1.0] * losses}
    of_workload = {
        "attention": {},
        "train_step": trained,
        "parity": trained,
        "stream": trained
        | {
            "stage_ends": [
                {"seq_len": seq_len, "num_steps": steps, "reserved_bytes": None, "compiled": 0, "compile_s": 0.0}
                for seq_len, steps in config.stages
            ]
        },
        "collective": {"curve": [{"message_bytes": size.sent_bytes, "ms": step_ms} for size in sizes]},
    }
    entry = {"phase": "forward", "op": "any", "calls": 1, "predicted_bytes": sent, "counted_bytes": sent}
    return (
        PROOFS[workload.name]
        | of_workload[workload.name]
        | {
            "rank_step_ms": [[step_ms] * workload.timed_steps] * ranks,
            "window_ms": [step_ms * workload.timed_steps] * ranks,
            "peak_host_bytes": [2**30] * ranks,
            "comm": [entry] if sent else [],
            "comm_counted_bytes": sent,
            **closed_forms.expected_work(config, padded_len or config.seq_len, 0).columns,
            "flags": [],
            "environment": {"hostname": "here", "packages": {"torch": "2.13.0"}, "device_names": []},
        }
    )
