# SPDX-License-Identifier: Apache-2.0
"""What readers build in the lessons, and how their functions are examined on real ranks."""

MARK = "\x1e"  # starts the report of an event, up to the end of the line
EVERY_RANK, ANY_RANK = -1, -2  # in place of the rank that a rank waits for
YOURS = "<your "  # starts the file names of the reader's functions
WAITING = 10.0  # seconds that a rank may wait for another, also on a busy machine


def in_words(error):
    """The kind and the text of an error, behind those of an earlier one that a `finally` held up."""
    earlier = None if error.__suppress_context__ else error.__context__
    before = f"{in_words(earlier)}, and then " if earlier else ""
    return f"{before}{type(error).__name__}: {error}"
