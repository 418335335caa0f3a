# SPDX-License-Identifier: Apache-2.0
"""The pipeline that readers build in lessons 01 to 05, and how their functions are examined."""

MARK = "\x1e"  # starts the report of an event, up to the end of the line
EVERY_RANK, ANY_RANK = -1, -2  # in place of the rank that a rank waits for
ANSWER = "answer "  # starts the line with a rank's report
RAISED = "raised "  # starts the line about an error in the reader's own code
WAITING = 10.0  # seconds that a rank may wait for another, also on a busy machine
