# SPDX-License-Identifier: Apache-2.0
"""Turns a check into a function that answers at once, in one line and without a traceback.

A check is a function that takes the learner's answer and returns a sentence if something is wrong,
None if all is right. The decorator `checked` turns it into the function that a notebook calls.
"""

import functools
import inspect
import math
import numbers
import random
from collections import deque
from collections.abc import Iterator, MappingView
from decimal import Decimal
from itertools import islice

from course import progress
from course.building import in_words
from course.building.endless_loops import endless_loops_ended
from pipeline.schedule import Schedule, ScheduleError
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import from_csv

# Seconds of processor time for one call of the learner's function. A right one that simulates each
# number of micro-batches until the bubble of lesson 02 is small enough takes 72.
LONGEST = 120
MOST_VALUES = 1_000_000  # of a generator
NOTHING = "the answer is None: methods such as sort() change a list and return nothing"
NOT_ATTEMPTED = "Not attempted yet: replace the ... in the cell above, run it, then run this cell."


def checked(praise, name=None):
    """Make a check print one line: not attempted, not yet and why, or right and what it means.

    `praise` is the text after "Right: ", or a function of the answers that returns it. `name` is
    the exercise's name in the reader's progress; without it, the name of the check is used. If the
    first argument of the check is `number`, that number follows the name.
    """

    def decorate(check):
        has_number = check.__code__.co_varnames[:1] == ("number",)

        @functools.wraps(check)
        def answer(*answers):
            line = _line_on(check, praise, answers)
            print(line)
            if any(map(_is_of_the_course, answers)):
                return  # a lesson shows what the check says; nobody has tried yet
            exercise = f"{name or check.__name__} {answers[0] if has_number else ''}".strip()[:80]
            progress.note(exercise, _outcome_of(line))

        return answer

    return decorate


def _line_on(check, praise, answers):
    """The line that a check prints."""
    if any(value is ... for value in answers):
        return NOT_ATTEMPTED
    if any(value is None for value in answers):
        return f"Not yet: {NOTHING}"
    try:
        complaint = check(*answers)
    except NotAttempted:
        return NOT_ATTEMPTED
    except WrongAnswer as error:
        return f"Not yet: {error}"
    except Exception as error:
        # The check assumed the form that the exercise asks for, and the answer has another.
        return (
            "Not yet: the answer does not have the form that this exercise asks for "
            f"({_in_short(error)})"
        )
    if complaint:
        return f"Not yet: {complaint}"
    return f"Right: {praise(*answers) if callable(praise) else praise}"


def _is_of_the_course(answer):
    return str(getattr(answer, "__module__", "")).startswith("course.building.")


def _outcome_of(line):
    if line.startswith("Right: "):
        return progress.RIGHT
    return progress.REACHED if line == NOT_ATTEMPTED else progress.TRIED


class NotAttempted(Exception):
    """The learner's function still returns the `...` of the stub."""


class WrongAnswer(Exception):
    """An answer that cannot be examined further; the text says why."""


def first_complaint(judge, cases):
    """The first complaint of `judge(case)` behind the words for its case, or None.

    `cases` is {words: case}; a case is asked only after those before it have passed.
    """
    for words, case in cases.items():
        try:
            complaint = judge(case)
        except WrongAnswer as error:
            complaint = str(error)
        if complaint:
            return f"{words}{complaint}"
    return None


def call(function, *arguments):
    """The result of the learner's function; that of a generator is a list.

    Raises NotAttempted, or WrongAnswer with the reason.
    """
    shown = ", ".join(map(repr, arguments)) if all(_is_short(a) for a in arguments) else "..."
    name = f"{_name_of(function)}({shown})"
    if not callable(function):
        raise WrongAnswer(f"this exercise asks for a function, not for {_in_short(repr(function))}")
    try:
        with endless_loops_ended(LONGEST):
            result = function(*arguments)
            result = list(islice(result, MOST_VALUES)) if isinstance(result, Iterator) else result
    except (Exception, SystemExit) as error:  # in the learner's code: a wrong answer
        raise WrongAnswer(f"{name} raised {in_words(error)}") from None
    if isinstance(result, list) and len(result) == MOST_VALUES:
        raise WrongAnswer(f"{name} gives {MOST_VALUES:,} values and more; does it end?")
    if result is ... and _is_begun(function):
        raise WrongAnswer(f"{name} returned `...`: write what is missing on that way through it")
    if result is ...:
        raise NotAttempted
    if result is None:
        raise WrongAnswer(f"{name} returned nothing; is there a return on every way through it?")
    return result


def _is_begun(function):
    """Whether a function names or counts something, which no stub does: it only returns `...`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return False
    numbers = [each for each in code.co_consts if isinstance(each, int | float)]
    return bool(code.co_names or numbers)


def call_for_number(function, *arguments):
    """Like `call`, for a function that must return a number."""
    result = call(function, *arguments)
    return require_number(result, f"{_name_of(function)} returned")


def require_number(value, name):
    """`value`, if it is a finite number. Raises WrongAnswer otherwise; `name` begins its text.

    A tensor or an array of one element is a number, too, and so is a Decimal.
    """
    value = number_in(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise WrongAnswer(f"{name} {_in_short(repr(value))}, which is not a number")
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # an integer or a Fraction may be larger than any float
        raise WrongAnswer(f"{name} a number of more than 308 digits") from None
    if isinstance(value, numbers.Integral):
        return int(value)
    if not is_finite:
        raise WrongAnswer(f"{name} {value}; is something divided by zero?")
    return float(value)  # a sentence can show it; before Python 3.12 it cannot show a Fraction


def number_in(value):
    """The number that a tensor or an array of one element holds; a Decimal as a float."""
    if math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    return float(value) if isinstance(value, Decimal) else value


def call_for_schedule(rows, num_ranks, num_microbatches):
    """The legal Schedule that the learner's function returns: one text per rank, "0F0,0F1,0B0"."""
    schedule = read_rows(call(rows, num_ranks, num_microbatches))
    case = f"{many(num_ranks, 'rank')}, {many(num_microbatches, 'micro-batch')}"
    if schedule.num_ranks != num_ranks:
        raise WrongAnswer(f"{case}: {many(schedule.num_ranks, 'row')}, one is needed for each rank")
    try:
        check_legal(schedule)
    except ScheduleError as error:
        raise WrongAnswer(f"{case}: {error}") from None
    if schedule.num_microbatches != num_microbatches:
        raise WrongAnswer(
            f"{case}: your rows hold {many(schedule.num_microbatches, 'micro-batch')}"
        )
    if schedule.num_stages != num_ranks:
        stages = many(schedule.num_stages, "stage")
        raise WrongAnswer(f"{case}: your rows hold {stages}, not one a rank")
    return schedule


def read_rows(rows, name="yours"):
    """The Schedule of `rows`: one text, or for each rank a text or a list of its actions."""
    if isinstance(rows, Schedule):
        return rows
    try:
        if isinstance(rows, Iterator):  # the lesson's next cell would find it empty
            raise TypeError
        is_text = isinstance(rows, str)
        rows = filter(str.strip, rows.splitlines()) if is_text else in_a_list(rows)
        lines = [row if isinstance(row, str) else ",".join(map(str, row)) for row in rows]
        return from_csv("\n".join(map(str.strip, lines)), name)
    except TypeError:
        example = "write one string per rank, such as '0F0,0F1,0B0,0B1', in a list"
        raise WrongAnswer(example) from None
    except ScheduleError as error:
        raise WrongAnswer(str(error)) from None


def in_a_list(value):
    """The items of an ordered container or a generator as a list. Raises TypeError for others.

    Of a dictionary these are the values, or the keys if all values are None, as in
    dict.fromkeys(calls).
    """
    if hasattr(value, "tolist"):  # of numpy
        value = value.tolist()
    if isinstance(value, dict):
        has_order_only = all(each is None for each in value.values())
        value = value.keys() if has_order_only else value.values()
    if not isinstance(value, (list, tuple, range, deque, Iterator, MappingView)):
        raise TypeError(f"{type(value).__name__} is not a list")
    return list(value)


def whole_numbers_in(value):
    """The whole numbers of a container, floats included, as int. Raises TypeError for others."""
    values = [number_in(each) for each in in_a_list(value)]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, numbers.Real) or each % 1:
            raise TypeError(f"{each!r} is not a whole number")
    return list(map(int, values))


def drawn(case, number=40):
    """`number` cases, made by `case(choose)` from a random.Random: the same ones in every run."""
    choose = random.Random(0)
    return [case(choose) for _ in range(number)]


def many(count, thing):
    """A count with its noun: "1 rank", "4 ranks", "1 micro-batch", "8 micro-batches"."""
    plural = "es" if thing.endswith("ch") else "s"
    return f"{count} {thing}{'' if count == 1 else plural}"


def close(value, wanted):
    return abs(value - wanted) <= 1e-9 * max(1.0, abs(wanted))


def _name_of(function):
    return getattr(function, "__name__", "the answer")


def _in_short(value, most=60):
    """`value` as one line of at most `most` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _is_short(value):
    return isinstance(value, (int, float, str)) and len(str(value)) <= 12
