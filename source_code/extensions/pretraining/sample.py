# SPDX-License-Identifier: Apache-2.0
"""A sample of what a model has learnt: it continues the first words of the held-out text."""


def show_sample(arguments, forward_only, step):
    """Print the sample after `step` updates if --sample is given. All ranks call it."""
    if arguments.sample:
        prompt = arguments.text.held_out[: arguments.seq_len // 4].tolist()
        tokens = forward_only.generate(
            prompt, arguments.sample, arguments.text.num_tokens, arguments.seed
        )
        if forward_only.job.rank == 0:
            begin, continuation = map(arguments.text.decode, (prompt, tokens[len(prompt) :]))
            print(f"after {step} steps  {begin!r} -> {continuation!r}", flush=True)
