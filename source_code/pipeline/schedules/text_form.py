# SPDX-License-Identifier: Apache-2.0
"""The text form of a schedule, which torch.distributed.pipelining reads and writes, too.

One row per rank, cells `stage kind micro-batch` such as `0F3`, separated by commas.
"""

import re
from pathlib import Path

from pipeline.schedule import KINDS, Action, Schedule, ScheduleError
from pipeline.schedules.legal import check_legal

LARGEST_CSV = 64 * 2**20  # bytes
# Cells of torch's lists that compute nothing: messages, and what FSDP does with its shards.
NOT_COMPUTED = r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB][0-9]+)"


def to_csv(schedule):
    """Return the text form: one row per rank."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)


def from_csv(text, name="custom"):
    """Read the text form. Empty cells are ignored. legal.py says whether the schedule can run.

    Raises ScheduleError for a cell that is not an action.

    torch's cells of two actions at once, `(0F1;3B0)OVERLAP_F_B`, are read as one after the other.
    Its cells for messages and shards, such as `0SEND_F1`, are left out: a rank sends what it has
    made, and receives what it needs next. In torch's files of 2024, which write a whole backward
    as BW, B is the half for the input.
    """
    orders = []
    rows = text.strip().splitlines()
    if re.search(r"[0-9]BW[0-9]", text):
        rows = [re.sub(r"([0-9])B([0-9])", r"\1I\2", row).replace("BW", "B") for row in rows]
    for row in rows:
        row = re.sub(r"\(([^();]*);([^();]*)\)OVERLAP_F_B", r"\1,\2", row)
        cells = [cell.strip() for cell in row.split(",")]
        cells = [cell for cell in cells if cell and not re.fullmatch(NOT_COMPUTED, cell)]
        order = []
        for step, cell in enumerate(cells):
            match = re.fullmatch(r"([0-9]{1,9})([A-Z])([0-9]{1,9})", cell)
            if match is None or match[2] not in KINDS:
                raise ScheduleError(
                    f"rank {len(orders)}, step {step}: {cell[:40]!r} is not an action; "
                    "write stage, kind (F, B, I, W or U) and micro-batch, as in 0F3"
                )
            order.append(Action(int(match[1]), match[2], int(match[3])))
        orders.append(tuple(order))
    return Schedule(name, tuple(orders))


def read_csv(path):
    """Read the text form from a file. Raises what `from_csv` does, OSError, or UnicodeDecodeError."""
    path = Path(path)
    if path.stat().st_size > LARGEST_CSV:
        raise ScheduleError(f"the file has more than {LARGEST_CSV:,} bytes")
    return from_csv(path.read_text(encoding="utf-8-sig"), name=path.stem)


def fix_of(error):
    """Return what to do about a file with this ScheduleError, which names a row if there is one."""
    if "belongs to no rank" in str(error):
        return "add its actions to a row, or number the stages without a gap"
    row = re.search(r"rank \d", str(error))
    return "mend that row" if row else "name a CSV file with a row per rank"


def read_schedule(path, num_ranks):
    """Return the schedule in a CSV file, or reject it and name the wrong rank and action."""
    try:
        schedule = check_legal(read_csv(path))
    except ScheduleError as error:
        raise SystemExit(f"{path}: {error}; {fix_of(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise SystemExit(
            f"{path} cannot be read ({reason}); name a CSV file with a row of actions per rank"
        ) from None
    if "U" in schedule.kinds:
        raise SystemExit(
            f"{path} has updates (U) in the middle of the step; only pipedream.py performs those"
        )
    if schedule.num_ranks != num_ranks:
        raise SystemExit(
            f"{path} is for {schedule.num_ranks} ranks, one per row, and this job has "
            f"{num_ranks}; start it with --nproc-per-node {schedule.num_ranks}"
        )
    return schedule
