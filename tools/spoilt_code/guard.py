"""Faults in what keeps a user from harm."""

from spoilt_code.fault import Fault

FAULTS = [
    Fault(
        "neighbour-blamed",
        "guard/watch.py::Watch.explain_silence",
        "rank {last} has stopped answering",
        "rank {wait.peer} has stopped answering",
        "The watch names the neighbour, which itself waits for the rank that has stopped.",
        "test_lost_ranks.py",
        ("test_the_end_of_a_chain_of_waits_is_blamed",),
    ),
    Fault(
        "deadlock-not-called-one",
        "guard/watch.py::Watch.explain_silence",
        "if last in [self.rank, wait.peer, *(peer for peer, _ in chain[:-1])] and chain:",
        "if last in [wait.peer, *(peer for peer, _ in chain[:-1])] and chain:",
        "Of two ranks that wait for each other, each says that it has stopped itself.",
        "test_lost_ranks.py",
        ("test_two_ranks_that_wait_for_each_other_are_called_a_deadlock",),
    ),
    Fault(
        "wait-never-taken-back",
        "guard/watch.py::Watch.announce",
        'f"{wait.peer} {wait.what}" if wait else ""',
        'f"{wait.peer} {wait.what}" if wait else "0 nothing"',
        "A rank that computes again still counts as waiting.",
        "test_lost_ranks.py",
        ("test_a_wait_that_is_over_is_taken_back",),
    ),
    Fault(
        "output-over-linked-input",
        "guard/paths.py::check_apart",
        "if real == other_real or same_file(real, other_real):",
        "if real == other_real:",
        "--losses overwrites the text of --data if the two are hard links of one file.",
        "test_inputs_and_outputs.py",
        ("test_two_names_of_one_file_are_one_path",),
    ),
    Fault(
        "settings-not-compared",
        "guard/around_main.py::attached",
        "settings_of(*parsed[-1]) if parsed else {}",
        "{}",
        "Ranks with other flags train together.",
        "test_joining.py",
        ("test_a_rank_with_other_flags_is_rejected_by_name_with_both_values",),
    ),
    Fault(
        "pickle-of-any-builtin",
        "guard/unpickling.py::Unpickler.find_class",
        "if isinstance(own, type) and issubclass(own, Exception):",
        "if own is not None:",
        "A file or another rank may name eval, and it is called.",
        "test_no_code_from_files.py",
        ("test_a_pickle_that_asks_for_more_than_is_allowed_is_rejected",),
    ),
    Fault(
        "lost-rank-misnamed",
        "guard/ending.py::text_of_loss",
        "lost rank {peer} while",
        "lost rank {rank} while",
        "A rank that has lost its neighbour names itself.",
        "test_lost_ranks.py",
        ("test_a_rank_whose_send_cannot_begin_waits_for_the_receipt",),
    ),
]
