"""Which of many similar cases `make test` tries; `make test-all` tries the others, too."""

import pytest
import torch

further = pytest.mark.further
# For `make test-torch`: an older torch.distributed.pipelining differs from the pinned one here.
SINCE_2_13 = pytest.mark.skipif(torch.__version__ < (2, 13), reason="needs torch 2.13")


def first_of(cases, number):
    """`cases` for pytest.mark.parametrize, of which `make test` takes the first `number` only."""
    return [
        with_marks(case, () if place < number else (further,)) for place, case in enumerate(cases)
    ]


def with_marks(case, marks):
    if hasattr(case, "marks"):  # one of pytest.param
        return pytest.param(*case.values, marks=(*case.marks, *marks))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)


def seeds_up_to(few, many=200, at_once=25):
    """Ranges of seeds for random changes: `few` for `make test-all`, and `many` for `make soak`.

    Those of the soak are ranges of `at_once`, since a test has ten minutes.
    """
    starts = range(few, few + many, at_once)
    return [
        pytest.param(range(few), marks=further),
        *(
            pytest.param(range(start, min(start + at_once, few + many)), marks=pytest.mark.soak)
            for start in starts
        ),
    ]


SEEDS = seeds_up_to(5)
