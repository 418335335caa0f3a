# SPDX-License-Identifier: Apache-2.0
"""The cases of lesson 12b: the fault and its ranks, its traces in a recording, and hints."""

# What each fault would show; printed for a reader who names it in the wrong case.
FAULTS = {
    "swapped messages": "a rank that sends what it made of another micro-batch",
    "scale forgotten": "on the last rank a share of the loss that is too large by a whole factor",
    "uneven cut": "the right losses, and a rank that works while all others wait for it",
    "buffer used twice": "a forward that is right in all it used and made, and a backward of the "
    "same micro-batch that is wrong although it received the right gradient",
    "receives in the wrong order": "a recording that ends in the middle, with ranks that wait",
    "clipping by stage": "actions that are right, and updates that take another fraction of what "
    "was gathered on each stage",
    "no stash": "a backward that used another version of the weights than its forward",
    "tied weights drift": "actions that are right, and an update that takes another gradient on "
    "the two ranks that share a matrix, and only there",
    "micro-batch lost": "a rank that has gathered nothing new after one of its backwards",
    "argument left out": "a forward that used the right input and the right weights, and made "
    "something else of them",
}
BEFORE_UPDATES = ("swapped messages", "scale forgotten", "buffer used twice")
IN_UPDATES = ("clipping by stage", "tied weights drift")


class Case:
    """One broken pipeline: its fault and ranks, the traces in a recording, and what it teaches."""

    def __init__(self, piece, fault, ranks, shows, elsewhere, found, cured, hints=()):
        self.piece, self.fault, self.ranks = piece, fault, ranks
        self.shows = shows  # describes the first difference without naming the fault
        self.elsewhere = elsewhere  # the answer to a reader who names another rank
        self.found, self.cured, self.hints = found, cured, hints


CASES = {
    1: Case(
        "next_to_send",
        "swapped messages",
        (1,),
        "the first difference is 1F0, which used and made what it should",
        "rank 1 already put the wrong tensor on the wire; what differs on other ranks came in with it",
        "rank 1 sends what it made of micro-batch 1 as if it were that of micro-batch 0.",
        "first in, first out: a receiver knows messages by their order alone.",
    ),
    2: Case(
        "loss_to_go_back_from",
        "scale forgotten",
        (3,),
        "the first difference is 3F0, which used what it should, and what it made is exactly eight "
        "times as large",
        "its gradients are eight times too large as they arrive; follow the messages back to where "
        "they begin",
        "every gradient begins at the loss, on the last rank, and there the eighth is missing. That "
        "the loss falls faster is no comfort: it is a step of eight times the length.",
        "the sum over micro-batches is the gradient of the batch's mean again.",
        hints=(
            "Which action differs first, and did it use what it should?",
            "Divide the norms of what that action made in the two runs.",
            "The quotient is a number that the run has among its flags, too.",
        ),
    ),
    3: Case(
        "layers_of_stages",
        "uneven cut",
        (3,),
        "all losses are those of one process; nothing is computed wrongly, it takes too long",
        "look at who waits: that rank does, in every round, and for whom?",
        "rank 3 has five of eleven layers, and a pipeline is as fast as its slowest stage.",
        "no stage has more layers than it must have, so none keeps the others waiting.",
        hints=(
            "Compare the losses of the two runs digit by digit.",
            "Look at the idle time of each rank. One of them never waits.",
            "Read off the names of its weights how many layers each stage has.",
        ),
    ),
    4: Case(
        "keep_activation",
        "buffer used twice",
        (2,),
        "the first difference is 2B0, which received the right gradient; its forward used and made "
        "what it should",
        "what differs on that rank came with a gradient; go back to the first action that received "
        "what it should and made something else",
        "by the time of 2B0 the memory that 2F0 had used holds the activation of another micro-batch.",
        "what a backward will need belongs to it until then.",
        hints=(
            "The first loss is right. Which action differs first, and what did it receive?",
            "Go back in time to the forward of the same micro-batch on the same rank: was it right?",
            "What happened on that rank between the two? Say to yourself what a backward needs besides the gradient.",
        ),
    ),
    5: Case(
        "order_of_receives",
        "receives in the wrong order",
        (2,),
        "the recording ends in the middle, and up to there nothing differs",
        "that rank waits for what its next action needs, as it should; one rank waits for something "
        "that its next action does not need",
        "rank 2 has its next backward before it and waits for the activation of a later forward.",
        "a rank waits for its messages in the order in which its actions need them.",
        hints=(
            "Does the run end? Put the cursor at the end of what was recorded.",
            "Write down for each rank what it waits for, and what its next action needs.",
            "Three of the four wait for exactly what their next action needs.",
        ),
    ),
    6: Case(
        "norm_to_clip_by",
        "clipping by stage",
        (0, 1, 2, 3),
        "every action of the first step is the same, and then every update takes another gradient",
        "compare what was gathered with what the update took, rank by rank",
        "each rank shortened its gradient by a factor of its own, so that the direction changed.",
        "one norm of the whole model, one factor for all.",
        hints=(
            "Every action of the first step is as it should be. What comes after the actions?",
            "The table of gradients, under the time machine, has what the backwards gathered and what the update took.",
            "Divide the one by the other, stage by stage, in both runs.",
        ),
    ),
    7: Case(
        "before_update",
        "no stash",
        (1,),
        "the first difference is 1B1, which received the right gradient and used version 1 of the "
        "weights; 1F1 used version 0",
        "its backwards use the version of their forwards; look for the rank where they do not",
        "on rank 1 the update changed the weights in place while mini-batches were under way.",
        "who still needs the old version keeps its memory, and the update writes into new.",
        hints=(
            "Count the losses that are right. When is the first update?",
            "Put the cursor on the first difference, then on the forward of the same mini-batch on the same rank.",
            "Which version of the weights does each of the two use, on this rank and on the others?",
        ),
    ),
    8: Case(
        "tied_gradient",
        "tied weights drift",
        (0, 3),
        "every action of the first step is the same, and the update takes another gradient on "
        "ranks 0 and 3, while on ranks 1 and 2 it takes the right one",
        "compare what each update took, rank by rank; two took another gradient, and these two "
        "share something",
        "the embedding and the head began as one matrix, and after the first update they are two.",
        "both add the gradients of both, and so both stay one matrix.",
        hints=(
            "Compare what the updates took, rank by rank, with what the healthy run took.",
            "Two ranks took something else. What do these two have that the others do not?",
            "Follow the norms of `embedding.weight` and `head.weight` from step to step: `read_recording(folder).weight(name, step)`.",
        ),
    ),
    9: Case(
        "run_schedule",
        "argument left out",
        (1,),
        "the first difference is 1F0, which used the right input and the right weights",
        "what differs there came from rank 1",
        "rank 1 calls step without the mask, and its attention looks into the other text of a row. "
        "The library hands arguments by name to the stage of the rank that gives them, and to no "
        "other.",
        "each rank gives its own stage all that its forward takes besides the activation.",
        hints=(
            "Compare with the run of one process: which action differs first?",
            "Did that action use the input that it should, and the weights?",
            "What goes into a forward besides its input and its weights?",
        ),
    ),
}
