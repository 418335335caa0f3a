"""The index of the website's search: the plain text of every section of every page.

A row of the glossary is a section of its own. Code can be found, too, but what the search shows of a
section is prose.
"""

import html
import json
import re

HEADING = r"<(h[1-3])\b[^>]*?(?: id=\"([^\"]*)\")?[^>]*>(.*?)</\1>"
NOT_TEXT = (
    r"<(svg|style|script|math|summary)\b.*?</\1>|<a class=\"anchor-link\".*?</a>"
    r"|<div class=\"prompt\b[^>]*>.*?</div>"
)
CODE = r"<pre\b.*?</pre>"
TERM = r"<tr>\s*<td>(.*?)</td>"  # the first cell of a row of the glossary


def sections_of(address, title, body):
    """[address with anchor, title, heading, prose, code] of each section of a page's HTML.

    The title is that of the page. A row of the glossary, see `with_terms`, is a section.
    """
    body = re.sub(NOT_TEXT, " ", body, flags=re.DOTALL)
    heads = list(re.finditer(HEADING, body, re.DOTALL))
    starts = [0, *(head.end() for head in heads)]
    ends = [*(head.start() for head in heads), len(body)]
    named = [("", ""), *((head[2] or "", text_of(head[3])) for head in heads)]
    sections = []
    for (anchor, heading), start, end in zip(named, starts, ends):
        part = body[start:end]
        code = text_of(" ".join(re.findall(CODE, part, re.DOTALL)))
        text = text_of(re.sub(CODE, " ", part, flags=re.DOTALL))
        if text or heading or code:
            where = f"{address}#{anchor}" if anchor else address
            sections.append([where, title, heading, text, code])
    for row in re.findall(r'<tr id="(term-[^"]*)">(.*?)</tr>', body, re.DOTALL):
        term, meaning = (text_of(cell) for cell in re.findall(r"<td>(.*?)</td>", row[1], re.S)[:2])
        sections.append([f"{address}#{row[0]}", title, term, meaning, ""])
    return sections


def with_terms(body):
    """The HTML of the glossary with an anchor at each row, which names its term."""

    def named(match):
        words = re.sub(r"\W+", "-", text_of(match[1]).lower()).strip("-")
        return match[0].replace("<tr>", f'<tr id="term-{words}">', 1)

    return re.sub(TERM, named, body)


def text_of(markup):
    """The visible text of some HTML, with single spaces."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def as_script(sections):
    """JavaScript, as text, that passes the index to search.js."""
    return f"globalThis.searchIndex = {json.dumps(sections, ensure_ascii=False)};\n"
