"""Formulas for pages without a network: TeX between double dollars becomes MathML."""

import re

from latex2mathml.converter import convert

PART = r"\([^()\n]{1,12} [−+] [^()\n]{1,12}\)"  # as in (p − 1)
IN_A_LINE = rf"{PART}(?:/(?:{PART}|\(\S+\)|\w+))?|\b\w{{1,3}}(?: [−+·] \w{{1,3}}\b)+"


def with_formulas(markdown):
    """`markdown` with each formula as MathML, which browsers draw without a library.

    A formula within a line of text, such as p − 1 or (p − 1)/(m + p − 1), is not broken at its spaces.
    """
    markdown = re.sub(IN_A_LINE, lambda m: m[0].replace(" ", "\N{NO-BREAK SPACE}"), markdown)
    return re.sub(r"\$\$(.+?)\$\$", lambda m: convert(m[1], display="block"), markdown, flags=re.S)
