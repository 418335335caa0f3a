"""The index of the website's search: the plain text of every section of every page."""

import html
import json
import re

HEADING = r"<(h[1-3])\b[^>]*?(?: id=\"([^\"]*)\")?[^>]*>(.*?)</\1>"
NOT_TEXT = r"<(svg|style|script|math)\b.*?</\1>|<a class=\"anchor-link\".*?</a>"


def sections_of(address, title, body):
    """[address with anchor, title of the page, heading, text] of each section of a page's HTML."""
    body = re.sub(NOT_TEXT, " ", body, flags=re.DOTALL)
    heads = list(re.finditer(HEADING, body, re.DOTALL))
    starts = [0, *(head.end() for head in heads)]
    ends = [*(head.start() for head in heads), len(body)]
    named = [("", ""), *((head[2] or "", text_of(head[3])) for head in heads)]
    sections = []
    for (anchor, heading), start, end in zip(named, starts, ends):
        text = text_of(body[start:end])
        if text or heading:
            sections.append([f"{address}#{anchor}" if anchor else address, title, heading, text])
    return sections


def text_of(markup):
    """The visible text of some HTML, with single spaces."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def as_script(sections):
    """JavaScript, as text, that passes the index to search.js."""
    return f"globalThis.searchIndex = {json.dumps(sections, ensure_ascii=False)};\n"
