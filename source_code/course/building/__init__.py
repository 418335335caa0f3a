"""The pipeline that readers build in lessons 01 to 05, and how their functions are examined."""

MARK = "\x1e"  # starts each line in which a rank reports an event
ANSWER = "answer "  # starts the line with a rank's report
RAISED = "raised "  # starts the line about an error in the reader's own code
WAITING = 10.0  # seconds that a rank may wait for another, also on a busy machine
