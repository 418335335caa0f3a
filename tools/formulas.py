"""Formulas for pages without a network: TeX between double dollars becomes MathML."""

import re

from latex2mathml import exceptions
from latex2mathml.converter import convert

PART = r"\([^()\n]{1,12} [−+] [^()\n]{1,12}\)"  # as in (p − 1)
# What latex2mathml raises for an incomplete formula; its own errors share no base class.
NOT_WHOLE = (
    *(each for each in vars(exceptions).values() if isinstance(each, type)),
    LookupError, RecursionError, StopIteration, ValueError,
)  # fmt: skip
IN_A_LINE = rf"{PART}(?:/(?:{PART}|\(\S+\)|\w+))?|\b\w{{1,3}}(?: [−+·] \w{{1,3}}\b)+"


class FormulaError(ValueError):
    """The text between double dollars is not a complete formula."""


def with_formulas(markdown):
    """`markdown` with each formula as MathML, which browsers draw without a library.

    A formula within a line of text, such as p − 1 or (p − 1)/(m + p − 1), is not broken at its spaces.
    Raises FormulaError for an incomplete one.
    """
    markdown = re.sub(IN_A_LINE, lambda m: m[0].replace(" ", "\N{NO-BREAK SPACE}"), markdown)
    return re.sub(r"\$\$(.+?)\$\$", mathml_of, markdown, flags=re.S)


def mathml_of(found):
    try:
        return convert(found[1], display="block")
    except NOT_WHOLE:
        raise FormulaError(f"the formula {found[0]} is not whole") from None
