"""What a reader builds in lessons 01 to 05, the file it grows into, and how it is examined."""

MARK = "\x1e"  # before each line by which a rank tells what it does
