"""The row's schema: what every column is called, holds, means and is made by. No torch.

Options of a trial are declared in config/, all other columns here. What a record must have, which columns are
computed and which are times follow from these declarations.
"""

from functools import partial
from typing import Literal, NamedTuple

import pyarrow as pa

from sp_bench.config.options import OPTIONS

SCHEMA_VERSION = 5  # 5: digest


class Column(NamedTuple):
    source: Literal["driver", "asked", "measured", "derived"]  # one name for each is below
    name: str
    type: pa.DataType
    unit: str
    doc: str
    per: Literal["rank", "step", None] = None  # a list with one entry for each
    is_time: bool = False  # null where `TrialConfig.is_timed` is false
    # Trials whose record must have it: `any`, a workload, a pass_kind, `perturbed` (packs or windows, attention of
    # ours), or `arms` (a record has all of these columns or none).
    required: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()  # trials that need not have it all the same: `fits` (workload.fit), `one_rank` (world)
    positive: bool = False  # all its numbers are times above 0
    since: int = 1  # the schema version from which on a trial of `required` has it


driver = partial(Column, "driver")  # which attempt at which trial, and what came of it
asked = partial(Column, "asked")  # what was asked for, and what the method's and the engine's code make of it
measured = partial(Column, "measured")  # what the ranks hand over
derived = partial(Column, "derived")  # what the driver computes from it (driver/derived.py)

TEXT, INT, REAL, FLAG, TIME = pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.timestamp("us", tz="UTC")
OF_TYPE = {str: TEXT, int: INT, float: REAL, bool: FLAG}
PER_RANK_INT, PER_RANK_REAL, PER_RANK_STEP = pa.list_(INT), pa.list_(REAL), pa.list_(pa.list_(REAL))
TENSOR_ERRORS = pa.struct([(name, REAL) for name in ("output", "dq", "dk", "dv")])
PARAMETER_ERROR = pa.struct([("parameter", TEXT), ("error", REAL), ("budget", REAL)])
IDENTITY_ERRORS = pa.struct([(name, REAL) for name in ("sum_dv", "sum_dk", "q_dq", "v_dv")])
COMM = pa.list_(
    pa.struct([("phase", TEXT), ("op", TEXT), ("calls", INT), ("predicted_bytes", REAL), ("counted_bytes", REAL)])
)
DEVICE_STATE = pa.list_(
    pa.struct(
        [
            *(("sm_clock_mhz", INT), ("memory_clock_mhz", INT), ("power_w", REAL), ("temperature_c", INT)),
            ("throttle_reasons", pa.list_(TEXT)),
        ]
    )
)
STEP_PARTS = pa.list_(pa.struct([(name, REAL) for name in ("forward", "recompute", "backward", "optimizer")]))
KERNEL_PARTS = pa.list_(
    pa.struct(
        [
            *((name, REAL) for name in ("messages", "host_copies", "attention", "matmul", "other")),
            *((name, REAL) for name in ("exposed_messages", "exposed_host_copies", "idle")),
        ]
    )
)
PHASE_ENDS = pa.list_(pa.struct([(name, INT) for name in ("forward", "backward", "optimizer")]))
PEAK_PARTS = pa.list_(
    pa.struct(
        [
            *((name, INT) for name in ("parameter_shards", "gathered_parameters", "gradients", "moments")),
            *((name, INT) for name in ("checkpoints", "attention", "tiles", "messages", "layers", "other")),
        ]
    )
)
LAUNCHES = pa.map_(TEXT, INT)
STAGE_ENDS = pa.list_(
    pa.struct(
        [
            *((name, INT) for name in ("seq_len", "num_steps", "reserved_bytes", "compiled")),
            ("compile_s", REAL),
        ]
    )
)
BATCHES = pa.list_(
    pa.struct(
        [
            *((name, INT) for name in ("documents", "longest", "passes")),
            *(("groups", pa.list_(INT)), ("imbalance", REAL)),
        ]
    )
)
STAGE_TIMES = pa.list_(pa.struct([(name, REAL) for name in ("first_step_ms", "median_step_ms", "tokens_per_s")]))
CURVE = pa.list_(pa.struct([("message_bytes", INT), ("ms", REAL)]))
ENVIRONMENT = pa.struct(
    [
        *(("hostname", TEXT), ("python", TEXT), ("packages", pa.map_(TEXT, TEXT)), ("cpu", TEXT), ("cpu_cores", INT)),
        *(("device_names", pa.list_(TEXT)), ("device_uuids", pa.list_(TEXT)), ("driver", TEXT), ("cuda", TEXT)),
        *(("cudnn", TEXT), ("nccl", TEXT), ("process_group", TEXT), ("env", pa.map_(TEXT, TEXT)), ("topology", TEXT)),
    ]
)

COLUMNS = (
    # what happened
    driver("status", TEXT, "", "ok | unsupported | oom | timeout | incorrect | error | preempted"),
    driver("reason", TEXT, "", "why the status is not ok; the first failing rank's message"),
    driver("phase", TEXT, "",
        "the last phase reached: plan, init, correctness, warmup, measure, ledger, handover, done"),
    driver("oom_site", TEXT, "", "torch | nccl | host, when status is oom"),
    derived("flags", pa.list_(TEXT), "", "doubts about the times of an ok row; docs/METRICS.md has their names"),
    # identity
    driver("schema_version", INT, "", "version of these columns"),
    driver("campaign", TEXT, "", "folder of the row"),
    driver("cell_id", TEXT, "", "hash of the semantic config; equal for the replicates of a cell"),
    driver("trial_id", TEXT, "", "hash of cell and replicate"),
    driver("env_id", TEXT, "", "hash of all that this trial was measured with: core_id, its method, kernel and engine"),
    driver("core_id", TEXT, "", "hash of packages, device model and shared measuring code; null in old rows: env_id"),
    driver("method_source", TEXT, "", "hash of the source of a method from outside; null: a method of this package"),
    driver("replicate", INT, "", "fresh-process repetition, from 0"),
    driver("attempt", INT, "", "launches of this trial, from 0"),
    driver("order_index", INT, "", "place in the campaign's randomised order"),
    driver("order_seed", INT, "", "seed of that order"),
    driver("digest", TEXT, "", "hash of the row's other values (rows/digest.py); null in old rows"),
    # what was asked for, and what the method's and the engine's code make of it
    *(asked(option.column, OF_TYPE[option.type], option.unit, option.doc) for option in OPTIONS if option.column),
    asked("implementation", TEXT, "", "whose code: sp_bench, or the library and its version"),
    asked("primitive", TEXT, "", "collective that moves the attention tensors"),
    asked("engine_implementation", TEXT, "", "whose code trains: sp_bench, or the libraries and their versions"),
    asked("batch_loading", TEXT, "",
        "training: a step's tokens are on the device before the first step (before), or its loop loads and copies them "
        "inside the step (in_step); null: an old row"),
    asked("loss_gradients", TEXT, "",
        "engine fsdp2: what makes the gradients of the loss's tiles: autograd, or one function of torch.compile's "
        "(compiled); null: no tiles, or an old row, where it is autograd"),
    asked("padded_seq_len", INT, "tokens", "length that was computed; tokens count valid ones, bytes padded ones"),
    derived("num_documents", INT, "", "packing: documents of the sequence"),
    derived("longest_document", INT, "tokens", "packing: the longest document"),
    derived("median_document", REAL, "tokens", "packing: median length of a document"),
    derived("flops_imbalance", REAL, "",
        "packing: attention FLOPs of the rank that computes most, over the mean of all ranks; predicted"),
    asked("ring_degree", INT, "ranks", "ranks that exchange KV"),
    asked("outer_ring_degree", INT, "ranks",
        "double_ring: ring_degree / inner_ring_degree; where either is 1, all ranks are in one ring; null: another "
        "method, or an old row"),
    asked("world_size", INT, "ranks", "all ranks of the trial"),
    asked("evidence", TEXT, "",
        "measured: all ranks were there | one_rank: one was, and holds the only entry of all lists by rank; its "
        "messages took what `link` says, and counts are its own | projected: by a fit; null in old rows: measured"),
    driver("proof", TEXT, "",
        "where it was proven, if not here: campaign/_proofs/ and a record of equal options, code and machine | "
        "one_rank: campaign/trial_id-env_id of the ok row of real ranks that proved its method, options and kernel"),
    measured("link_busy_ms", REAL, "ms",
        "one_rank: by the link model, how long the messages of a step keep the busiest link"),
    asked("ran_rank", INT, "",
        "one_rank: which rank was there; null: all were, or an old row (`real_rank`, or its code's default)"),
    asked("ranks_per_node", INT, "ranks", "of each host, and so its GPUs; null in old rows: world_size"),
    asked("config", TEXT, "JSON", "the whole trial config, canonical"),
    # time
    derived("step_ms", pa.list_(REAL), "ms", "per step, the largest of rank_step_ms", per="step", is_time=True),
    measured("rank_step_ms", PER_RANK_STEP, "ms", "per rank, per step",
        per="rank", is_time=True, required=("any",), positive=True),
    measured("window_ms", pa.list_(REAL), "ms", "per rank, wall clock around all timed steps",
        per="rank", is_time=True, required=("any",), positive=True),
    derived("median_step_ms", REAL, "ms", "median of step_ms", is_time=True),
    derived("tokens_per_s", REAL, "tokens/s", "valid global tokens of a step / median_step_ms", is_time=True),
    derived("tokens_per_s_per_gpu", REAL, "tokens/s", "tokens_per_s / world_size", is_time=True),
    derived("window_tokens_per_s", REAL, "tokens/s",
        "valid global tokens of all timed steps / the longest of window_ms; readers add it to older rows",
        is_time=True),
    # where the time goes: the same step in the same processes, right after the timed one
    measured("compute_only_step_ms", pa.list_(REAL), "ms", "per step, max over ranks: messages are local copies",
        per="step", is_time=True, required=("arms",), positive=True),
    measured("compute_only_rank_ms", PER_RANK_REAL, "ms", "per rank, median of its own compute-only steps",
        per="rank", is_time=True, required=("arms",), positive=True),
    derived("imbalance_ms", REAL, "ms", "median of compute_only_step_ms - mean of compute_only_rank_ms", is_time=True),
    measured("comm_only_step_ms", pa.list_(REAL), "ms", "per step, max over ranks: all but the attention kernels",
        per="step", is_time=True, required=("arms",), unless=("stream",), positive=True),
    derived("exposed_comm_ms", REAL, "ms", "median_step_ms - median of compute_only_step_ms", is_time=True),
    derived("overlap_efficiency", REAL, "", "1 - exposed_comm_ms / median of comm_only_step_ms; null without traffic",
        is_time=True),
    measured("stage_ends", STAGE_ENDS, "tokens, steps, bytes, -, s",
        "stream: of each stage its length and steps, what torch's allocator has reserved at its end, the largest rank "
        "(null: CPU), and how often and how long rank 0 compiled in its steps",
        required=("stream",)),
    derived("stage_times", STAGE_TIMES, "ms, ms, tokens/s",
        "stream: of each stage its first step, the median of the others, and tokens/s of that median; max over ranks",
        is_time=True),
    measured("batches", BATCHES, "-, tokens, -, ranks, -",
        "stream of drawn documents: of each batch its documents, passes, sizes of groups, and work of the rank "
        "that has most over the mean of all; predicted"),
    measured("stage_loss_errors", pa.list_(REAL), "",
        "stream in half precision: where two stages meet, the losses of tokens that both lengths have, on "
        "the same weights, relative L2; null: fp32, fp64, or an old row"),
    # the collective workload: the method's primitive over message sizes
    measured("curve", CURVE, "bytes, ms", "bytes one rank sends off-rank, median over steps of the max over ranks",
        required=("collective",)),
    derived("latency_us", REAL, "us", "alpha of the fit ms = alpha + bytes / beta"),
    derived("bandwidth_bytes_per_s", REAL, "bytes/s", "beta of that fit: bytes one rank sends off-rank per second"),
    measured("compile_s", REAL, "s",
        "training: rank 0's seconds in torch.compile before the timed steps, proof included"),
    measured("optimizer_ms", REAL, "ms",
        "fsdp2 with engine.optimizer_offload: rank 0's median time of AdamW in host memory, of the timed steps",
        is_time=True),
    # work
    derived("model_flops", REAL, "FLOP",
        "FLOPs of a step over all ranks, mask-exact, attention backward 2x, no recompute"),
    derived("hardware_flops", REAL, "FLOP", "what ran: attention backward 2.5x, with recompute"),
    measured("counted_matmul_flops", REAL, "FLOP",
        "matrix products outside attention in one step, all ranks; null: uncounted"),
    measured("counted_attention_flops", REAL, "FLOP", "calls of the kernel in one step, all ranks; null: uncounted"),
    measured("counted_parameters", INT, "", "elements that one step's optimizers updated, all ranks; null: uncounted"),
    derived("mfu", REAL, "", "model_flops / time / world_size / peak; null when the device's peak is unknown",
        is_time=True),
    derived("hfu", REAL, "", "the same of hardware_flops", is_time=True),
    derived("float8_mfu", REAL, "",
        "products in FP8: model_flops / time / world_size / peak in FP8; mfu keeps the peak of dtype, which attention "
        "and head have; null: none, or the peak is unknown", is_time=True),
    derived("attention_flops_per_s", REAL, "FLOP/s", "attention workload, all ranks, forward 1x and backward 2.5x",
        is_time=True),
    # what the untimed step is made of; it is slower than a timed one, for its operations are counted
    measured("part_ms", STEP_PARTS, "ms", "per rank, phases of the untimed step; null: the engine does not mark them",
        per="rank", is_time=True),
    measured("kernel_ms", KERNEL_PARTS, "ms",
        "per rank: CUDA kernels of the untimed step by class, messages that nothing hides, and nothing running",
        per="rank", is_time=True),
    measured("limit_ms", PER_RANK_REAL, "ms",
        "train_step, per rank: attention and matrix products alone, nothing twice", per="rank", is_time=True),
    derived("share_of_limit", REAL, "", "max over ranks of limit_ms / median_step_ms", is_time=True),
    # memory
    measured("peak_allocated_bytes", PER_RANK_INT, "bytes", "per rank, torch's allocator; null on CPU", per="rank"),
    measured("peak_reserved_bytes", PER_RANK_INT, "bytes", "per rank, torch's allocator; null on CPU", per="rank"),
    measured("peak_host_bytes", PER_RANK_INT, "bytes", "per rank, peak resident set of the process while measured",
        per="rank", required=("any",)),
    measured("pinned_host_bytes", INT, "bytes",
        "training on fsdp2: host memory of a rank for its checkpoints; page-locked, but not on a CPU"),
    measured("device_used_bytes", PER_RANK_INT, "bytes", "per rank, whole device, after the timed steps; null on CPU",
        per="rank"),
    measured("allocator_retries", PER_RANK_INT, "", "per rank, in the timed steps; more than 0: they ran at the brink",
        per="rank"),
    measured("leftover_bytes", PER_RANK_INT, "bytes",
        "per rank, allocated by torch before what is measured was built: of earlier trials or proofs; null: CPU",
        per="rank"),
    measured("phase_end_bytes", PHASE_ENDS, "bytes", "per rank, allocated as phases of that step ended; null: CPU",
        per="rank"),
    measured("peak_parts_bytes", PEAK_PARTS, "bytes",
        "per rank, the peak of the untimed step by what holds it (workload.trace); null: CPU, or not traced",
        per="rank"),
    derived("max_peak_allocated_bytes", INT, "bytes", "max over ranks of peak_allocated_bytes"),
    derived("max_peak_host_bytes", INT, "bytes", "max over ranks of peak_host_bytes"),
    derived("predicted_peak_bytes", INT, "bytes", "training: what the memory model says of the allocator's peak"),
    measured("host_step_ms", PER_RANK_REAL, "ms", "per rank, the host's time to issue a step; null: CPU",
        per="rank", is_time=True),
    measured("host_launch_us", PER_RANK_REAL, "us", "per rank, the host's time to issue one operation, after the steps",
        per="rank", is_time=True),
    # the device, by NVML from outside the timed window; null on CPU and where NVML does not tell
    measured("energy_j", PER_RANK_REAL, "J", "per rank, energy of the timed window / timed_steps",
        per="rank", is_time=True),
    measured("device_state", DEVICE_STATE, "", "per rank, sampled while the device works on untimed steps",
        per="rank", is_time=True),
    measured("power_limit_w", PER_RANK_REAL, "W", "per rank, the power that the device may draw", per="rank"),
    measured("application_clock_mhz", pa.list_(INT), "MHz",
        "per rank, the clock that was set for applications; null: the driver does not say", per="rank"),
    measured("launched_kernels", pa.list_(TEXT), "",
        "CUDA kernels of attention in one untimed step; else torch's operations"),
    measured("kernel_launches", LAUNCHES, "", "how often each of launched_kernels ran in that step, all ranks"),
    measured("trace_files", pa.list_(TEXT), "",
        "traces of the untimed step (workload.trace), from the campaign's folder"),
    # communication: bytes one rank sends off-rank in one step, max over ranks, phase `other` left out of the totals
    derived("comm_predicted_bytes", REAL, "bytes", "closed form"),
    measured("comm_counted_bytes", REAL, "bytes", "counted from the collectives of one untimed step",
        required=("any",)),
    measured("comm_wire_bytes", REAL, "bytes", "NVLink counters; null where traffic takes another way"),
    derived("internode_predicted_bytes", PER_RANK_REAL, "bytes",
        "per rank, of comm_predicted_bytes those to other nodes; null: one node, or no closed form", per="rank"),
    measured("internode_counted_bytes", PER_RANK_REAL, "bytes", "per rank, counted to other nodes; null: one node",
        per="rank"),
    measured("comm", COMM, "bytes", "by phase and op", required=("any",)),
    # correctness, at the reduced length by default
    measured("correctness_seq_len", INT, "tokens", "length at which the method was proven",
        required=("attention", "train_step"), unless=("one_rank",)),
    measured("rel_error_output", REAL, "", "relative L2 against the reference",
        required=("attention", "train_step"), unless=("one_rank",)),
    measured("rel_error_dq", REAL, "", "relative L2 against the reference",
        required=("forward_backward",), unless=("one_rank",)),
    measured("rel_error_dk", REAL, "", "relative L2 against the reference; with kv_lora_rank of the latents' gradient",
        required=("forward_backward",), unless=("one_rank",)),
    measured("rel_error_dv", REAL, "", "relative L2 against the reference; with kv_lora_rank of the up-projections'",
        required=("forward_backward",), unless=("one_rank",)),
    measured("rel_error_dg", REAL, "", "of the decay's logarithm's gradient; null: no gated delta rule, no backward"),
    measured("rel_error_dbeta", REAL, "", "of the gradient of beta; null: no gated delta rule, no backward"),
    measured("rel_error_dsinks", REAL, "", "of the sinks' gradient; null: no sinks, no backward, or an old row"),
    measured("error_budget", TENSOR_ERRORS, "", "2 x (error of the math kernel in this dtype + eps)",
        required=("attention", "train_step"), unless=("one_rank",)),
    measured("kernel_rel_error", TENSOR_ERRORS, "", "the row's kernel alone on one device",
        required=("attention", "train_step"), unless=("one_rank",)),
    measured("repeat_difference", TENSOR_ERRORS, "",
        "packing, window: largest difference of an element between two equal runs", required=("perturbed",)),
    measured("outside_difference", TENSOR_ERRORS, "",
        "packing: the same outside a document that is changed; window: out of reach of a key that is changed",
        required=("perturbed",)),
    measured("inside_difference", TENSOR_ERRORS, "",
        "packing: the same inside the document; window: at its edge", required=("perturbed",)),
    measured("sampled_rel_error", REAL, "", "output of 64 rows of the timed length against fp32 (fp64 on CPU)",
        required=("attention", "train_step"), since=2, unless=("fits", "one_rank")),
    measured("sampled_grad_error", TENSOR_ERRORS, "",
        "dq, dk, dv of a loss of those rows; null: no backward, or an old row",
        required=("forward_backward", "train_step"), since=2, unless=("fits", "one_rank")),
    measured("sampled_head_error", TENSOR_ERRORS, "",
        "output, dq, dk, dv of those rows in the worst KV head; null: an old row"),
    measured("identity_error", IDENTITY_ERRORS, "",
        "identities of all rows' gradients at the timed length, the largest of any KV head; null: no backward, old row",
        required=("forward_backward", "train_step"), since=2, unless=("fits", "one_rank")),
    measured("replay_rel_error", TENSOR_ERRORS, "", "cuda_graph: replayed against eager, at the timed length"),
    measured("rel_error_loss", REAL, "",
        "train_step: relative L2 over the tokens' losses of the first step against one process; stream of drawn "
        "documents in half precision: largest error of a batch's loss",
        required=("train_step",), unless=("one_rank",)),
    measured("max_error_loss", REAL, "", "train_step: worst error of a token's loss, over their root mean square"),
    measured("rel_error_grad_norm", REAL, "",
        "train_step: gradient norm of the first step against one process; stream of drawn documents in half precision: "
        "largest of a batch",
        required=("train_step",), unless=("one_rank",)),
    measured("grad_error", PARAMETER_ERROR, "",
        "train_step: worst parameter's gradient before clipping, relative L2 against one process; null: an old row"),
    measured("update_error", PARAMETER_ERROR, "roundings",
        "train_step: worst element of parameters and moments of 3 steps against the formula, in eps of |parameter| + "
        "|update|; null: an old row"),
    measured("fp32_proof", TEXT, "",
        "train_step in half precision: its step was proven in fp32 too, by its method (method), or by ours of the same "
        "degrees where its own takes half precision only (step_only); null: fp32, fp64, or an old row"),
    measured("fp32_grad_error", PARAMETER_ERROR, "", "train_step: grad_error of the proof in fp32"),
    measured("float8_grad_error", PARAMETER_ERROR, "",
        "products in FP8: worst parameter's gradient in the second step against one process without FP8, relative L2; "
        "budget: 2 x (error of one process that rounds to FP8 by plain casts + 2^-5)"),
    measured("float8_product_error", PARAMETER_ERROR, "",
        "the worst product of a layer's matrices, forward or backward, against that of factors rounded by plain casts; "
        "budget: half of what that rounding costs"),
    measured("timed_loss_error", REAL, "",
        "train_step: tokens' losses at the timed length and full depth against the same text cut short; null: old row",
        required=("train_step",), since=2, unless=("fits", "one_rank")),
    measured("timed_max_loss_error", REAL, "", "train_step: the worst of these tokens, over their root mean square",
        required=("train_step",), since=2, unless=("fits", "one_rank")),
    measured("fall_error", REAL, "",
        "train_step: fall of the loss along the gradients of all layers, against what these say (relative); in fp32 "
        "where the trial is in half precision; null: an old row",
        required=("train_step",), since=5, unless=("fits", "one_rank")),
    measured("full_loss_error", REAL, "",
        "train_step: tokens' losses of all layers there against one process, relative L2",
        required=("train_step",), since=5, unless=("fits", "one_rank")),
    measured("fall_budget", REAL, "", "what fall_error may be; above 1% it cannot tell right from wrong",
        required=("train_step",), since=5, unless=("fits", "one_rank")),
    measured("full_update_error", PARAMETER_ERROR, "roundings",
        "update_error of 5 steps of all layers at the trial's own settings",
        required=("train_step",), since=5, unless=("fits", "one_rank")),
    measured("line_error", REAL, "",
        "train_step: what the loss changes by at most from one step to the next, over the largest; older rows: where "
        "timed steps begin or end, and the first, how far it was off how it went at the reduced length",
        required=("train_step",), since=5, unless=("fits", "one_rank")),
    measured("last_update_error", PARAMETER_ERROR, "roundings", "update_error of the step that is not timed",
        required=("train_step",), since=5, unless=("one_rank",)),
    measured("repeated_gradient_error", REAL, "",
        "train_step with a `proof`: the gradient that the optimizers get in the first step, off that of the trial that "
        "proved it (relative, the worst tensor)"),
    measured("timed_rel_error", TENSOR_ERRORS, "",
        "attention: output and dq of 64 rows that the last timed step and one drawn at random returned, the larger",
        required=("attention",), since=5, unless=("one_rank",)),
    measured("check_s", pa.map_(TEXT, REAL), "s",
        "attention, train_step: rank 0's seconds of each check (docs/METRICS.md); those of a `proof` are left out"),
    measured("max_nll_difference", REAL, "nats",
        "parity, stream: largest token-weighted NLL difference over the steps; half precision: of a rehearsal in fp32; "
        "products in FP8: from one process in bf16",
        required=("parity", "stream")),
    measured("mean_nll_difference", REAL, "nats", "parity, stream: mean over the steps of the same, absolute",
        required=("parity", "stream")),
    measured("max_grad_norm_difference", REAL, "", "parity, stream: largest relative difference of the gradient norm",
        required=("parity", "stream")),
    measured("control_nll_difference", REAL, "nats",
        "parity with products in FP8: max_nll_difference of one process that rounds to FP8 by plain casts, from one in "
        "bf16, as that of the trial is; half its budget"),
    measured("loss", pa.list_(REAL), "nats/token", "train_step, parity, stream: loss of each step",
        per="step", required=("train_step", "parity", "stream"), unless=("one_rank",)),
    measured("grad_norm", pa.list_(REAL), "", "train_step, parity, stream: global gradient norm of each step",
        per="step", required=("train_step", "parity", "stream"), unless=("one_rank",)),
    # provenance
    driver("started_at", TIME, "UTC", "when the attempt was launched"),
    driver("duration_s", REAL, "s", "launch to exit"),
    driver("phase_s", pa.map_(TEXT, REAL), "s", "seconds in each phase, rank 0; old rows have imports in init"),
    driver("git_sha", TEXT, "", "commit; <commit>+tree:<hash> of changed code, tree:<hash> of a copy (rows/git.py)"),
    driver("git_dirty", FLAG, "", "uncommitted changes of sp_bench/ or conf/"),
    measured("environment", ENVIRONMENT, "", "libraries, devices, driver, process group, variables by allow-list",
        required=("any",)),
    driver("node_environments", pa.list_(ENVIRONMENT), "",
        "of each host of a trial over several, in the order of the ranks; null: one host"),
)  # fmt: skip

# Units and words stay here: in each file they would be two thirds of it, and reading thousands of files as much slower.
PARAMETER_ERRORS = tuple(column.name for column in COLUMNS if column.type == PARAMETER_ERROR)
SCHEMA = pa.schema(
    [pa.field(c.name, c.type) for c in COLUMNS], metadata={"sp_bench.schema_version": str(SCHEMA_VERSION)}
)
# Fields inside columns that older rows have: the schema version from which on no row does.
RETIRED = {f"peak_parts_bytes.{name}": 5 for name in ("before", "loss", "optimizer", "parameters")}
