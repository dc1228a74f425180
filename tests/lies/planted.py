"""Every lie that is planted in a trial, and what the trial must end in."""

from dataclasses import dataclass, replace

ATTENTION = ("workload=attention", "method=ulysses", "sp_size=2", "seq_len=96", "kernel=math")


DELTA = (*ATTENTION[:-1], "kernel=chunked", "model.attention=gated_delta")

FORWARD = (*ATTENTION, "workload.pass_kind=forward")

TRAIN_STEP = ("workload=train_step", "method=ulysses", "sp_size=2", "seq_len=96", "kernel=math")


LONG_AND_DEEP = (
    "workload=train_step",
    "method=ulysses",
    "sp_size=2",
    "seq_len=768",
    "kernel=math",
    "model.num_layers=4",
)


SHORT = (
    *("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2"),
    "hardware.threads_per_rank=1",  # many run at a time
)

MASKED = (*TRAIN_STEP, "workload.masked_label_share=0.5")  # rank 0 has no label

WINDOW = (*ATTENTION, "workload.window=20")

BORDERS = ("workload=attention", "method=ring", "method.layout=zigzag", *ATTENTION[2:], "workload.window=20")

SINKS = ("workload=attention", "method=ring", *ATTENTION[2:], "workload.sinks=true")

PACKED = (*ATTENTION, "workload.packing=fixed", "workload.document_len=32")

PACKED_WINDOW = (*PACKED, "workload.window=20")

PACKED_BORDERS = (*BORDERS, *PACKED[-2:])


@dataclass(frozen=True)
class Lie:
    name: str  # in lies.py
    group: str  # heading in the table of docs/RELIABILITY.md
    what: str  # in plain words, for that table
    trial: tuple[str, ...]  # overrides of the command line
    reason: str  # regular expression that the row's reason matches
    status: str = "incorrect"
    ranks: str = "all"
    phase: str = "init"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    needs: tuple[str, ...] = ()  # packages without which it is skipped
    quick: bool = False  # some run in the ordinary tests, all with `-m faults`


ALONE = ("workload=train_step", "method=single", "sp_size=1", "seq_len=96")

LIES = [
    Lie(
        "kernel_returns_zeros",
        "Attention",
        "the kernel returns zeros",
        ATTENTION,
        "kernel math on one device: relative error of output",
        quick=True,
    ),
    *(
        Lie(
            name,
            "The record",
            what,
            TRAIN_STEP if name == "record_halves_times" else ATTENTION,
            f"the record is broken: {reason}",
            status="error",
            ranks="0",
            dtypes=("float32",),
            quick=name == "record_has_nan_median",
        )
        for name, what, reason in (
            (
                "record_has_a_step_less",
                "fewer steps than were asked for",
                "rank_step_ms of rank 0 has 1 steps; expected timed_steps=2",
            ),
            (
                "record_halves_times",
                "each step's time halved",
                r"rank_step_ms of rank 0 adds up to .*; expected its window_ms=",
            ),
            ("record_has_another_length", "another `seq_len`", "seq_len=4096; .* since 96 was asked for"),
            ("record_has_nan_median", "a median that is not a number", "median_step_ms=nan; .* since the driver has"),
            ("record_has_null_median", "no median", "median_step_ms=null; .* since the driver has"),
            ("record_has_negative_rate", "tokens/s of -1", "tokens_per_s=-1; .* since the driver has"),
            ("record_has_flops_of_another_shape", "FLOPs of another shape", r"model_flops=1e\+18; .* the driver has"),
            ("record_has_no_bytes", "no communication", "predicted_bytes of comm add up to 0.0; expected"),
        )
    ),
    Lie(
        "forward_cached",
        "At the timed length",
        "the kernel returns the output of its first call, whatever its inputs are",
        ATTENTION,
        "the last timed step at seq_len=96: relative error of output",
        quick=True,
    ),
    Lie(
        "forward_cached",
        "At the timed length",
        "the same in a training step",
        TRAIN_STEP,
        "sampled rows at seq_len=96: relative error of output",
    ),
    Lie(
        "rows_wrong_beyond_a_length",
        "At the timed length",
        "a window of 16 rows is zero beyond a length",
        ATTENTION,
        "the last timed step at seq_len=96: relative error of output",
    ),
    Lie(
        "dv_of_a_kv_head_dropped",
        "At the timed length",
        "the kernel drops dv of one KV head beyond a length",
        ATTENTION,
        "the last timed step at seq_len=96: sum dv = sum dout does not hold in KV head",
    ),
    Lie(
        "result_kept_while_inputs_stay",
        "At the timed length",
        "the kernel returns its last output while its inputs are of the same memory and version",
        ("workload=attention", "method=single", "sp_size=1", *ATTENTION[3:]),
        "the last timed step at seq_len=96: relative error of output",
    ),
    Lie(
        "gradients_of_the_sample_only",
        "At the timed length",
        "dk and dv lack a third of the queries, but where the check asks for a sample of rows they are right",
        ATTENTION,
        "the last timed step at seq_len=96: sum dv = sum dout does not hold in KV head",
    ),
    Lie(
        "positions_lost",
        "At the timed length",
        "each rank of a training step counts its tokens from 0 at the timed length",
        TRAIN_STEP,
        "the losses of the first 72 tokens at seq_len=96 differ from those at seq_len=72",
    ),
    Lie(
        "positions_lost",
        "At the timed length",
        "the same in the zigzag layout",
        tuple(each.replace("method=ulysses", "method=ring") for each in TRAIN_STEP),
        "the losses of the first 48 tokens at seq_len=96 differ from those at seq_len=48",
    ),
    Lie(
        "label_wrong_at_an_edge",
        "At the timed length",
        "the last token of rank 0 has a wrong label at the timed length",
        TRAIN_STEP,
        "losses of .* at seq_len=96 differ from those at seq_len=(48|72)",
    ),
    Lie(
        "loss_scaled",
        "At the timed length",
        "the losses of a training step are 1% too large at the timed length",
        TRAIN_STEP,
        "the losses of the first 48 tokens at seq_len=96 differ from those at seq_len=48",
    ),
    Lie(
        "no_backward",
        "At the timed length",
        "timed steps have no backward",
        TRAIN_STEP,
        "the gradient norm is 0.0: there was no backward",
        phase="measure",
    ),
    Lie(
        "optimizer_step_left_out",
        "At the timed length",
        "the optimizer updates nothing in timed steps",
        TRAIN_STEP,
        "the optimizer changed no weight of ranks 0, 1 in the timed steps",
        phase="measure",
    ),
    Lie(
        "optimizer_step_left_out",
        "At the timed length",
        "the same on one rank of two",
        TRAIN_STEP,
        "the optimizer changed no weight of ranks 1 in the timed steps",
        phase="measure",
        ranks="1",
    ),
    Lie(
        "step_repeated",
        "At the timed length",
        "one timed step is taken, and its result given for the others",
        TRAIN_STEP,
        "all 2 timed steps have loss .*: one was repeated",
    ),
    *(
        Lie(
            name,
            "Training step: the update",
            what + " (ZeRO-3)" * (engine == "deepspeed"),
            (*TRAIN_STEP, f"engine={engine}"),
            reason,
            ranks="1" if name == "norm_gradients_missing" else "all",
            needs=("deepspeed",) if engine == "deepspeed" else (),
            quick=engine == "fsdp2" and name == "norm_gradient_halved",
        )
        for name, what, reason, *engines in (
            (
                "optimizer_step_left_out",
                "the optimizer's step does nothing",
                "AdamW leaves .* as it was in step .*, and keeps no exp_avg or exp_avg_sq",
                *("fsdp2", "deepspeed"),
            ),
            (
                "parameters_rounded",
                "the optimizer's own parameters are rounded to bfloat16",
                "parameter of .* after step . is .* roundings off what adamw with lr=",
                *("fsdp2", "deepspeed"),
            ),
            ("sgd", "SGD instead of AdamW", "SGD updates .*, but is no adamw in step .", "fsdp2", "deepspeed"),
            (
                "tenfold_learning_rate",
                "a learning rate ten times too high",
                "parameter of .* after step . is .* roundings off what adamw with lr=",
                *("fsdp2", "deepspeed"),
            ),
            (
                "not_clipped",
                "no clipping",
                r"the gradient of .* that the optimizer gets in step . differs from the clipped one by",
                "fsdp2",
            ),
            (
                "gradients_negated",
                "gradients negated, their norm as it was",
                r"the gradient of .* in step 1, before clipping, differs from one process by 2 \(relative\)",
                "fsdp2",
            ),
            (
                "gradients_doubled",
                "the backward of twice the loss",
                "the gradient of .* in step 1, before clipping, differs from one process by",
                "fsdp2",
            ),
            (
                "norm_gradient_halved",
                "the gradient of one norm's weight halved",
                "the gradient of norm.weight in step 1, before clipping, differs from one process by 0.5",
                "fsdp2",
            ),
            (
                "norm_gradients_missing",
                "the norms' gradients of one rank missing",
                "the gradient of .*norm.weight in step 1, before clipping, differs from one process by",
                *("fsdp2", "deepspeed"),
            ),
            (
                "labels_wrong_at_edges",
                "a wrong label at the edge of each shard",
                "loss.* of step 1 differs from one process by",
                *("fsdp2", "deepspeed"),
            ),
        )
        for engine in engines
    ),
    *(
        Lie(
            name,
            "Options of a training step",
            f"{what}; the timed step has 4 layers, and tiles as long as the proof's sequence",
            (*LONG_AND_DEEP, "workload.activation_checkpointing=full", option),
            r"the gradient of \S+ in step 1, before clipping, differs from one process",
            quick=True,
        )
        for name, what, option in (
            (
                "checkpoints_in_one_place",
                "in host memory each layer's checkpoint overwrites the one before",
                "workload.checkpoint_offload=true",
            ),
            (
                "tiles_not_added",
                "of an MLP in tiles each tile's gradient replaces that of the tiles before",
                "workload.mlp_tile_tokens=48",
            ),
        )
    ),
    *(
        Lie(
            name,
            "Options of a training step",
            f"{what} in bf16, where fp32 is said",
            (*TRAIN_STEP, *options),
            "gradients of matrices are to be summed in float32, and in one step a rank added two of them",
            dtypes=("bfloat16",),
        )
        for name, what, options in (
            (
                "tiles_added_in_half_precision",
                "gradients of an MLP in tiles are summed over the tiles",
                ("workload.activation_checkpointing=full", "workload.mlp_tile_tokens=20"),
            ),
            (
                "loss_tiles_added_in_half_precision",
                "the head's gradient is summed over the tiles of the loss",
                ("workload.loss_tile_tokens=20",),
            ),
        )
    ),
    *(
        Lie(
            name,
            "Options of a training step",
            what,
            (*TRAIN_STEP, *options),
            reason,
        )
        for name, what, options, reason in (
            (
                "attention_recomputed",
                "attention is run again, and `selective` is said",
                ("workload.activation_checkpointing=selective",),
                "recompute all_to_all",
            ),
            (
                "kept_output_is_zero",
                "`selective_output` finds zeros as the output that it kept",
                ("workload.activation_checkpointing=selective_output",),
                r"the gradient of blocks\.\d\.attention\.\S+ in step 1, before clipping, differs from one process",
            ),
            (
                "checkpoints_stay",
                "checkpoints stay on the device, and `checkpoint_offload` is said",
                ("workload.activation_checkpointing=full", "workload.checkpoint_offload=true"),
                "offloaded checkpoints took 0 bytes of host memory",
            ),
            (
                "checkpoints_lost",
                "checkpoints come back from host memory as zeros",
                ("workload.activation_checkpointing=full", "workload.checkpoint_offload=true"),
                r"the gradient of \S+ in step 1, before clipping, differs from one process",
            ),
            (
                "last_tile_left_out",
                "the last tile of an MLP is not computed",
                ("workload.activation_checkpointing=full", "workload.mlp_tile_tokens=20"),
                "loss of (step 1|one token of step 1) differs from one process",
            ),
            (
                "gradients_reduced_each_time",
                "gradients are reduced in each micro-batch, and `last_micro_batch` is said",
                ("workload.micro_batches=2", "engine.reduce_gradients=last_micro_batch"),
                "gradients reduce_scatter",
            ),
        )
    ),
    Lie(
        "layers_left_out",
        "One rank, too",
        "the timed decoder has two of its three layers, as the proof's has",
        (*ALONE, "model.num_layers=3"),
        "with all 3 layers at seq_len=48: the tokens' losses differ from one process by ",
    ),
    Lie(
        "fp32_under_another_name",
        "One rank, too",
        "the decoder computes in fp32 under the name of bf16",
        ALONE,
        "in bfloat16 counted 0, predicted .*; in float32 counted .*, predicted 0",
        dtypes=("bfloat16",),
        quick=True,
    ),
    Lie(
        "half_the_text",
        "One rank, too",
        "the timed steps train on half of the text",
        ALONE,
        "the losses of the first 96 tokens at seq_len=96 differ |"  # fp32 has a run to compare with at that length
        "FLOPs of matrix products outside attention, on all ranks: in .* counted .*, predicted ",
        phase="warmup",
    ),
    Lie(
        "last_layer_not_updated",
        "One rank, too",
        "the timed steps do not update the last layer",
        ALONE,
        "in the step that is not timed: step 4 updates no tensor ",
        phase="warmup",
    ),
    Lie(
        "fallback_kernel_in_every_second_layer",
        "Launched kernels",
        "one layer of two has another kernel than asked for",
        (*ALONE, "kernel=cpu_flash"),
        "rank 0 called kernel cpu_flash 2 times forward and 2 backward, .*; what ran: 1 x aten::_scaled",
        quick=True,
    ),
    Lie(
        "kernel_computes_twice",
        "Launched kernels",
        "the kernel computes each forward twice",
        ATTENTION,
        "rank 0 called kernel math 1 times forward and 1 backward, .*; what ran: .* 2 x aten::logsumexp",
    ),
    Lie(
        "kernel_called_twice",
        "Launched kernels",
        "the method calls the kernel once too often",
        (*ALONE, "kernel=math"),
        "rank 0 called the attention kernel 4 times forward and 2 backward; the method's blocks make it 2 and 2",
    ),
    Lie(
        "kernel_left_out_in_a_hop",
        "Launched kernels",
        "in the timed steps the ring leaves out the kernel of a hop",
        ("workload=train_step", "method=ring", "method.layout=zigzag", "sp_size=2", "seq_len=96", "kernel=math"),
        # whichever finds it first
        "the losses of the first 48 tokens at seq_len=96 differ|"
        "rank 1 called the attention kernel 2 times forward and 4 backward; the method's blocks make it 4 and 6",
        phase="warmup",
    ),
    Lie(
        "boundaries_ignored",
        "Packed documents",
        "the kernel ignores where documents end",
        PACKED,
        "kernel math on one device: relative error of output",
    ),
    Lie(
        "documents_leak",
        "Packed documents",
        "the output of each document has a trace of the others, which is smaller than the budget",
        PACKED,
        "perturbed document: output of other documents changes by .* of an element, and 16 equal runs differ by 0",
        quick=True,
    ),
    Lie(
        "window_one_too_wide",
        "Windows and sinks",
        "the kernel's window is one token wider",
        WINDOW,
        "kernel math on one device: relative error of output",
    ),
    Lie(
        "window_one_too_wide_beyond_a_length",
        "Windows and sinks",
        "the same at the timed length only",
        WINDOW,
        "the last timed step at seq_len=96: relative error of output",
        quick=True,
    ),
    Lie(
        "window_ignored",
        "Windows and sinks",
        "the kernel ignores the window",
        WINDOW,
        "kernel math on one device: relative error of output",
    ),
    Lie(
        "border_skipped",
        "Windows and sinks",
        "a ring leaves out the hop that brings the border",
        BORDERS,
        "method on 2 ranks: relative error of output",
    ),
    Lie(
        "window_unshifted",
        "Windows and sinks",
        "a ring applies the window to each block as if its first query and first key were neighbours",
        BORDERS,
        "method on 2 ranks: relative error of output",
    ),
    *(
        Lie(name, "Windows of packed documents", what, PACKED_WINDOW, "kernel math on one device: relative error of")
        for name, what in (
            ("window_across_documents", "the kernel applies the window across the borders of documents"),
            ("window_one_too_wide", "the kernel's window is one token wider"),
        )
    ),
    *(
        Lie(name, "Windows of packed documents", what, PACKED_BORDERS, "method on 2 ranks: relative error of output")
        for name, what in (
            ("border_across_documents", "a ring's border has keys of the document before, which its queries see"),
            ("window_unshifted", "a ring applies the window to each block as if it began there"),
            ("border_skipped", "a ring leaves out the hop that brings the border"),
        )
    ),
    Lie(
        "sinks_counted_on_each_rank",
        "Windows and sinks",
        "each rank of a ring merges the sinks",
        SINKS,
        "method on 2 ranks: relative error of dsinks",
    ),
    Lie(
        "sinks_not_learnt",
        "Windows and sinks",
        "the sinks get no gradient",
        SINKS,
        "method on 2 ranks: relative error of dsinks",
    ),
    Lie(
        "sinks_not_learnt",
        "Windows and sinks",
        "the same in a training step, where they are weights",
        ("workload=train_step", "method=ring", *ATTENTION[2:], "model.sinks=true"),
        "method on 2 ranks: relative error of dsinks",
    ),
    Lie(
        "loss_averaged_over_ranks",
        "Masked labels",
        "the loss is the mean over ranks of each one's mean, and one rank has no label",
        MASKED,
        "the gradient of .* in step 1, before clipping, differs from one process",
    ),
    Lie(
        "no_rope",
        "The reference",
        "no RoPE anywhere, on one rank and in the decoder that all engines of ours share",
        ALONE,
        "loss of (step 1|one token of step 1) differs from one process",
        quick=True,
    ),
    Lie(
        "hidden_bytes",
        "The reference",
        "a method sends everything twice, and its own closed form says so",
        ATTENTION,
        "forward all_to_all",
        quick=True,
    ),
    *(
        Lie(name, "Unequal labels", what, trial, "the gradient of .* in step 1, before clipping, differs", quick=True)
        for name, what, trial in (
            (
                "mean_of_means",
                "the step's loss is the mean of its micro-batches' means",
                (*TRAIN_STEP, "workload.micro_batches=2"),
            ),
            (
                "mean_of_data_ranks",
                "the step's loss is the mean of its data-parallel ranks' means",
                ("workload=train_step", "method=single", "sp_size=1", "dp_shard_size=2", "seq_len=96", "kernel=math"),
            ),
            (
                "loss_averaged_over_ranks",
                "the step's loss is the mean over the ranks of a sequence of each one's mean, without masked labels",
                TRAIN_STEP,
            ),
        )
    ),
]

# Of all layers, of later steps, and of gradients at the timed length.
DEEP = (*TRAIN_STEP, "model.num_layers=5")
HYBRID = (
    *("model=qwen3_next_dense", "model.hidden_size=64", "model.intermediate_size=192", "model.vocab_size=256"),
    *("model.num_heads=8", "model.num_kv_heads=2", "model.head_dim=16"),
    *("model.delta_heads=8", "model.delta_kv_heads=4", "model.delta_head_dim=8"),
)
FALLS = r"with all \d layers at seq_len=48: the loss changes by .* nats where the gradients say"
FULL = "workload.activation_checkpointing=full"

LIES += [
    *(
        Lie(name, "All layers", what, (*DEEP, *options), reason, quick=quick)
        for name, what, reason, quick, *options in (
            (
                "late_layers_without_rope",
                "no RoPE from the third layer on",
                "with all 5 layers at seq_len=48: the tokens' losses differ from one process",
                True,
            ),
            (
                "late_kv_of_another_layer",
                "the layers from the third on attend to the third's keys and values",
                "with all 5 layers at seq_len=48: the tokens' losses differ from one process",
                False,
            ),
            (
                "late_kv_without_gradient",
                "no gradient through K and V from the third layer on",
                r"the gradient of blocks\.4\.attention\.(v|k_norm)\.weight in step \d is 0: nothing trains it",
                False,
            ),
            (
                "late_kv_half_the_gradient",
                "half of the gradient through K and V from the third layer on",
                FALLS,
                False,
            ),
            (
                "late_layers_halve_the_gradient_below",
                "each layer from the third on halves the gradient of what is below",
                FALLS,
                False,
            ),
            (
                "late_layers_recomputed_elsewhere",
                "the layers from the third on are recomputed with other positions",
                FALLS,
                False,
                FULL,
            ),
            (
                "late_kept_output_is_zero",
                "`selective_output` finds zeros from the third layer on",
                FALLS,
                False,
                "workload.activation_checkpointing=selective_output",
            ),
            (
                "late_checkpoint_overwritten",
                "in host memory the fourth layer's checkpoint overwrites the third's",
                FALLS,
                True,
                FULL,
                "workload.checkpoint_offload=true",
            ),
            (
                "checkpoints_of_the_step_before",
                "checkpoints come back from host memory as they were in the step before",
                FALLS,
                True,
                FULL,
                "workload.checkpoint_offload=true",
            ),
            (
                "kept_output_of_another_layer",
                "`selective_output` finds the output of another layer in every third call",
                f"{FALLS}|the gradient of .* in step 1, before clipping, differs",
                False,
                "workload.activation_checkpointing=selective_output",
            ),
            ("late_gradients_halved", "the gradients of the layers from the third on are halved", FALLS, True),
            (
                "late_kinds_swapped",
                "the third layer has the window of the fourth, which hides nothing at the reduced length",
                "with all 5 layers at seq_len=48: the tokens' losses differ from one process",
                False,
                *("model.layers=window+full", "model.window=60"),
            ),
            (
                "late_norm_gradients_halved",
                "the gradients of the norms' weights are halved from the third layer on",
                FALLS,
                True,
            ),
            (
                "late_sink_gradients_halved",
                "the gradients of the sinks are halved from the third layer on",
                FALLS,
                False,
                "model.sinks=true",
            ),
            (
                "late_decay_gradients_halved",
                "the gradients of the rates at which states decay are halved from the third layer on",
                FALLS,
                False,
                *HYBRID,
            ),
            (
                "late_gradients_zero",
                "the gradients of the layers from the third on are zero",
                r"the gradient of blocks\.4\.\S+ in step \d is 0: nothing trains it",
                False,
            ),
        )
    ),
    *(
        Lie(name, "Later steps", what, TRAIN_STEP, reason, quick=name == "negated_after_step_3")
        for name, what, reason in (
            ("negated_after_step_3", "gradients negated after the third step", FALLS),
            (
                "every_second_update_left_out",
                "every second update left out after the third step",
                "with all . layers at seq_len=48: .* of .* after step [45] is .* roundings off",
            ),
            (
                "first_parameter_alone_updated",
                "one parameter alone updated after the third step",
                "with all . layers at seq_len=48: .* of .* after step [45] is .* roundings off",
            ),
            (
                "updates_late_by_a_step",
                "updates late by a step after the third",
                "with all . layers at seq_len=48: .* of .* after step [45] is .* roundings off",
            ),
        )
    ),
    *(
        Lie(name, "Later steps", what, trial, reason, phase=phase, quick=quick)
        for name, what, trial, reason, phase, quick in (
            (
                "labels_lost_after_the_first_step",
                "two labels of each rank lost after the first step",
                TRAIN_STEP,
                "the losses of step 2 at seq_len=48 differ from step 1 by",
                "init",
                False,
            ),
            (
                "micro_batch_repeated_from_step_4",
                "from the fourth step on one micro-batch is trained on twice",
                (*TRAIN_STEP, "workload.micro_batches=2"),
                "the losses of step 4 at seq_len=48 differ from step 1 by",
                "init",
                False,
            ),
            (
                "learning_rate_has_a_floor",
                "a learning rate that never goes below 1e-4, where the trial has 1e-6",
                TRAIN_STEP,
                "with all . layers at seq_len=48: .* after step . is .* roundings off",
                "init",
                False,
            ),
            (
                "clipping_at_one_ignored",
                "clipping at a norm of 1.0 is ignored",
                TRAIN_STEP,
                "with all . layers at seq_len=48: the gradient of .* that the optimizer gets in step . differs",
                "init",
                False,
            ),
            (
                "later_rates_tenfold",
                "a learning rate ten times too high in the timed steps and after them",
                TRAIN_STEP,
                "in the step that is not timed: .* after step 4 is .* roundings off",
                "measure",
                True,
            ),
            (
                "sgd_steps_skipped",
                "every second step of SGD is not taken, from the timed steps on",
                (*TRAIN_STEP, "workload.optimizer=sgd"),
                "in the step that is not timed: the optimizer took 3 of 4 steps on tensor",
                "measure",
                True,
            ),
            (
                "sgd_updates_skipped",
                "every second step of SGD updates nothing, from the timed steps on",
                (*TRAIN_STEP, "workload.optimizer=sgd"),
                "in the step that is not timed: the optimizer took 3 of 4 steps on tensor",
                "measure",
                False,
            ),
            (
                "last_micro_batch_dropped",
                "the timed steps leave out the last micro-batch, and no other step does",
                (*TRAIN_STEP, "workload.micro_batches=2"),
                "the losses of the steps on one text are .* change by 0.(49|50)",
                "measure",
                True,
            ),
            (
                "half_of_timed_text",
                "the timed steps train on half of the text, and no other step does",
                TRAIN_STEP,
                "the losses of the steps on one text are",
                "measure",
                False,
            ),
            *(
                (
                    name,
                    what,
                    (*TRAIN_STEP, "workload.warmup_steps=2"),
                    "the losses of the steps on one text are .* change by 0.(49|5)",
                    "warmup",
                    quick,
                )
                for name, what, quick in (
                    (
                        "half_of_text_after_the_first_step",
                        "every step after the first, which is a warm-up step, trains on half of the text",
                        False,
                    ),
                    ("half_of_text_in_every_second_step", "every second step trains on half of the text", True),
                )
            ),
            (
                "timed_attention_left_out",
                "the timed steps leave out attention, and no other step does",
                TRAIN_STEP,
                "the (losses|gradient norms) of the steps on one text are",
                "measure",
                False,
            ),
        )
    ),
    *(
        Lie(name, "At the timed length", what, trial, reason, dtypes=("float32",), quick=quick)
        for name, what, trial, reason, quick in (
            (
                "timed_gradients_larger",
                "all gradients 1.5 times too large at the timed length, on two ranks",
                TRAIN_STEP,
                "with all . layers at seq_len=72: the loss changes by",
                False,
            ),
            (
                "timed_gradients_larger",
                "the same on one rank",
                ALONE,
                "with all . layers at seq_len=96: the loss changes by",
                False,
            ),
            (
                "timed_gradients_reversed",
                "all gradients have their rows in reversed order at the timed length",
                ALONE,
                "with all . layers at seq_len=96: the loss changes by",
                True,
            ),
            (
                "last_tile_trains_nothing",
                "the last tile of an MLP adds nothing to the gradients of its weights at the timed length",
                (*ALONE, FULL, "workload.mlp_tile_tokens=20"),
                "with all . layers at seq_len=96: the loss changes by",
                False,
            ),
        )
    ),
    *(
        Lie(
            name,
            "At the timed length",
            what,
            (*ATTENTION, "model.num_heads=8", "model.num_kv_heads=4"),
            f"(timed step.*|sampled rows) at seq_len=96, in one {where}: relative error of {tensor}"
            + "|sum dv = sum dout does not hold in KV head 0" * (tensor == "dv"),
            ranks="0",
            dtypes=("bfloat16",),
            quick=tensor == "dk" or name.startswith("last_row_of_output"),
        )
        for name, what, tensor, where in (
            *(
                (f"kv_head_of_{tensor}_3_percent_off", f"{tensor} is 3% too large in one KV head", tensor, "KV head")
                for tensor in ("output", "dq", "dk", "dv")
            ),
            *(
                (
                    f"last_row_of_{t}_6_percent_off",
                    f"{t} of one row is 6% too large in one KV head",
                    t,
                    "row and KV head",
                )
                for t in ("output", "dq")
            ),
        )
    ),
    Lie(
        "first_timed_output_halved",
        "At the timed length",
        "the output is halved in one timed step, which is the one that is drawn",
        ATTENTION,
        "timed step 1, which was drawn, at seq_len=96: relative error of output",
        phase="warmup",
        quick=True,
    ),
    Lie(
        "first_timed_delta_output_halved",
        "At the timed length",
        "the same of the gated delta rule",
        DELTA,
        "timed step 1, which was drawn, at seq_len=96: relative error of output",
        phase="warmup",
    ),
    Lie(
        "result_computed_later",
        "At the timed length",
        "the output is computed when it is first read",
        FORWARD,
        "the method returns a Later, which may be computed later than the step ends",
    ),
    Lie(
        "result_filled_later",
        "At the timed length",
        "the output's memory is filled after the clock",
        FORWARD,
        r"(the last timed step|timed step \d, which was drawn,) at seq_len=96: relative error of output",
    ),
    *(
        Lie(
            f"timed_{tensor}_halved",
            "At the timed length",
            f"{tensor} is halved in the timed steps, and in no other",
            ATTENTION,
            f"the last timed step at seq_len=96: {reason}",
            phase="measure",
            quick=tensor == "output",
        )
        for tensor, reason in (
            ("output", "relative error of output"),
            ("dq", "relative error of dq"),
            ("dv", "sum dv = sum dout does not hold"),
        )
    ),
    *(
        Lie(
            f"float8_{name}",
            "Products in FP8",
            what,
            (*trial, "workload.linear_dtype=float8_tensorwise"),
            "differs from one process by|in FP8 differs from",
            dtypes=("bfloat16",),
            needs=("torchao",),
            quick=name == "amax_stale",
        )
        for name, what, trial in (
            ("scale_of_another_tensor", "a tensor has the scale of the one before it", ALONE),
            ("amax_stale", "the scale of the first tensor of a shape serves all later ones", ALONE),
            ("gradients_unscaled", "products with gradients are not scaled back", ALONE),
            ("gathered_scales_stale", "gathered matrices keep their first scale", TRAIN_STEP),
            ("left_out", "products stay in bf16", ALONE),
        )
    ),
]

# One of each kind is told in processes that trials share, too.
IN_SHARED_PROCESSES = (
    *("late_gradients_halved", "learning_rate_has_a_floor", "negated_after_step_3", "last_micro_batch_dropped"),
    *("timed_gradients_reversed", "timed_output_halved", "kv_head_of_dk_3_percent_off", "no_rope", "mean_of_means"),
)
LIES += [
    replace(lie, what=f"{lie.what}; in processes that trials share", trial=(*lie.trial, "isolation=group"), quick=False)
    for lie in LIES
    if lie.name in IN_SHARED_PROCESSES
]
