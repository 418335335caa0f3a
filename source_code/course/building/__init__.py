"""What a reader builds, the file that lessons 01 to 05 grow, and how each is examined."""

MARK = "\x1e"  # before each line by which a rank tells what it does
ANSWER = "answer "  # how the line begins in which a rank reports
RAISED = "raised "  # and the one about an error in the reader's own code
