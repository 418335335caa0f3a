# SPDX-License-Identifier: Apache-2.0
"""Compares the flight logs of two runs, and names the first action in which they differ.

    torchrun --standalone --nproc-per-node 4 source_code/one_f_one_b.py --record build/monday
    torchrun --standalone --nproc-per-node 4 source_code/one_f_one_b.py --record build/tuesday
    python source_code/compare_logs.py build/monday build/tuesday

The status is 0 if nothing differs, 1 if something does, and 2 if the two cannot be compared. Times
are not compared. With --tolerance 1e-9, tensors count as equal if they are that close, as fractions
of their norms: for another device, number of threads or type.
"""

import sys

from guard.around_main import guarded
from guard.one_sentence import shortened
from lab.flight_log_comparing import compare
from lab.flight_log_reader import RecordingError, read_recording
from pipeline.command_line import Parser, number_from_zero


@guarded
def main():
    parser = Parser(__doc__)
    parser.add_argument("one", metavar="FOLDER", help="the log of a run")
    parser.add_argument("other", metavar="OTHER", help="the log of another run")
    parser.add_argument(
        "--tolerance", type=number_from_zero, metavar="X", default=0.0, help="0 compares the bits"
    )
    arguments = parser.parse_args()
    try:
        one, other = read_recording(arguments.one), read_recording(arguments.other)
        found = compare(one, other, arguments.tolerance)
    except RecordingError as error:
        raise SystemExit(str(error)) from None
    if found is None:
        print(f"no difference in {len(one.steps)} steps of {one.schedule.num_stages} stages")
        return 0
    print(shortened(found.sentence))  # a log may have any names
    return 1


if __name__ == "__main__":
    sys.exit(main())
