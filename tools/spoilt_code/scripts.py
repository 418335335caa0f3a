"""Faults in the scripts whose loops are written by hand."""

from spoilt_code.fault import Fault

FAULTS = [
    Fault(
        "gpipe-loop-one-too-few",
        "gpipe.py::run_step",
        """\
    for k in range(len(inputs)):
        gradient = None
""",
        """\
    for k in range(len(inputs) - 1):
        gradient = None
""",
        "The last micro-batch has no backward.",
        "test_loops_by_hand.py",
        ("test_a_loop_takes_exactly_the_actions_of_its_schedule",),
    ),
    Fault(
        "1f1b-loop-sends-first",
        "one_f_one_b.py::run_step.backward",
        "expect_activation(warm_up + 1 + k)",
        "expect_activation(warm_up + k)",
        "The receive of an activation is posted one micro-batch too late.",
        "test_message_order.py",
        ("test_neither_does_a_loop_by_hand",),
    ),
    Fault(
        "1f1b-loop-keeps-gradients",
        "one_f_one_b.py::run_step.backward",
        'job.release_sent(Message("gradient", job.rank, k - 2))',
        'job.release_sent(Message("gradient", job.rank, -1))',
        "A rank keeps all gradients that it has sent until its step ends.",
        "test_sent_buffers.py",
        ("test_in_1f1b_rank_r_has_at_most_p_minus_r_plus_2_sent_tensors_for_any_m[one_f_one_b]",),
    ),
    Fault(
        "zero-bubble-loop-in-bulk",
        "zero_bubble.py::run_step",
        "if len(deferred) > kept_back:",
        "if len(deferred) > len(inputs):",
        "All weight gradients wait for the cool-down.",
        "test_loops_by_hand.py",
        ("test_a_loop_takes_exactly_the_actions_of_its_schedule",),
    ),
    Fault(
        "interleaved-chunk-forwards",
        "interleaved_1f1b.py::run_step.backward",
        "stage, gradient = stages[v - 1 - chunk], None",
        "stage, gradient = stages[chunk], None",
        "Backwards go through the stages of a rank in the order of the forwards.",
        "test_loops_by_hand.py",
        ("test_so_does_interleaved_1f1b_with_several_chunks",),
    ),
    Fault(
        "pipedream-updates-early",
        "pipedream.py::run_training.backward",
        "group = max(count, arguments.microbatches)",
        "group = count",
        "Double buffering updates after each micro-batch, not after a group.",
        "test_loops_by_hand.py",
        ("test_so_does_pipedream_with_one_update_for_several_microbatches",),
    ),
    Fault(
        "spread-work-of-whole-head",
        "vocabulary_parallel.py::work_of_stages",
        "head * count / a.vocabulary for count in rows",
        "head for count in rows",
        "With --spread each rank is paced as if it had the whole head.",
        "test_vocabulary_parallel.py",
        ("test_a_pace_is_that_of_one_layer_and_the_head_is_paced_by_its_weights",),
    ),
    Fault(
        "recompute-flag-ignored",
        "predict.py::main",
        "arguments.recompute,",
        "0.0,",
        "predict.py takes --recompute and predicts without it.",
        "test_predict.py",
        ("test_recompute_adds_a_forward_to_every_backward",),
    ),
    Fault(
        "norm-not-checked",
        "pipeline_with_data_parallel.py::main",
        "find_not_finite(job, step, loss, norm)",
        "find_not_finite(job, step, loss, None)",
        "A gradient norm of NaN does not end the training.",
        "test_not_finite.py",
        (
            "test_a_norm_that_is_not_finite_ends_the_training_before_its_update"
            "[pipeline_with_data_parallel]",
        ),
    ),
]
