"""How the words and the figure of a slide share its height: as large as fits, no slide half empty.

All lengths are pixels of a slide of 1280 x 720. Words are estimated from the number of letters: as
long as the widest usual font makes them, so that nothing runs over the edge, and as short as the
narrowest does where a slide must not be half empty.
"""

import math
import re

WIDTH = 1168
ROOM = 540  # for sentence and figure, below a title of one line
TITLE_LINE = 48
TITLE_LETTERS = 50  # of one line of a title
LETTER = 0.56  # the width of a letter over its height, at most
NARROW = 0.46  # and at least
LINE = 1.35  # the height of a line over that of its letters
GAP = 22  # below a sentence
SIZES = (60, 54, 50, 46, 42, 38, 34, 32)
ALONE = (60, 66, 72, 80, 88)  # for few words without a figure
TITLE = 68
MOST_WORDS = 44  # of all sentences of a slide
HALF = 360
POINTS_BACK = (
    r"(It|Its|They|Their|Them|This|These|That|Those|Both|Here|There|So|Then|But|And|Each of (?:them|"
    r"these)|All of them|The (?:two|three|others?|same|first|second|latter|former)|He|She|Instead)\b"
)


def with_subject(sentence, before, asks):
    """The sentence, with the one before it if it points back to that one, or if it `asks`.

    `before` is the text between the start of the paragraph and the sentence, in Markdown.
    """
    if not asks and not re.match(POINTS_BACK, sentence.lstrip("*")):
        return sentence
    sentence = re.sub(r"^So (\w)", lambda start: start[1].upper(), sentence)
    paragraph = re.sub(r"<!--.*?-->", "", before).rsplit("\n\n", 1)[-1].strip()
    sentences = re.split(r"(?<=[.?!])\s+", " ".join(paragraph.split()))
    last = sentences[-1]
    whole = last.endswith((".", ":")) and not re.search(r"^\||```|!\[|\$\$|^#", last)
    if not whole or len(f"{last} {sentence}".split()) > MOST_WORDS:
        return sentence
    return f"{last} {sentence}"


def said_on_the_slide(sentence, note, room, may_go_on, next_sentence=""):
    """(the words on the slide, the rest of the note), with more sentences while half is empty.

    A sentence that the next slide begins with is left to it.
    """
    if not may_go_on:
        return sentence, note
    following, rest = sentences_and_rest(note)
    while following and HALF - 100 > height_of(sentence, SIZES[2], room):
        longer = f"{sentence} {following[0]}"
        leads_on = re.search(r"[?:]$|: (- |1\.$)", following[0])  # to an answer or a list
        if leads_on or following[0] in next_sentence or len(longer.split()) > MOST_WORDS:
            break
        sentence = longer
        following.pop(0)
    return sentence, note_of(following, rest)


def without_title(sentence, title, note):
    """(the words on the slide, the rest of the note) without a first sentence that repeats the title."""
    first, *more = sentences_and_rest(sentence)[0] or [""]
    following, rest = sentences_and_rest(note)
    words = " ".join(more) or (following.pop(0) if following else "")
    if not repeats(first, title) or not words or words.endswith((":", "?")):
        return sentence, note
    return (sentence, note) if re.match(POINTS_BACK, words) else (words, note_of(following, rest))


def repeats(sentence, title):
    """Whether a sentence says hardly more than the title."""
    said, named = (set(re.findall(r"\w+", each.lower())) for each in (sentence, title))
    return len(named & said) >= 0.75 * len(named) and len(said - named) <= 2


def sentences_and_rest(text):
    """(the sentences of the first paragraph, the other paragraphs)."""
    paragraph, *rest = text.split("\n\n", 1)
    return [one for one in re.split(r"(?<=[.?!])\s+", paragraph.strip()) if one], rest


def note_of(sentences, rest):
    return "\n\n".join(filter(None, [" ".join(sentences), *rest]))


def size_of(sentence, title, figure):
    """The height of a sentence's letters: the largest with which it and the figure fit.

    Words alone are larger, until they take half of the slide.
    """
    room = ROOM - figure - TITLE_LINE * (len(title) > TITLE_LETTERS)
    if not figure:
        longest = max(map(len, re.split(r"[\s-]", words_of(sentence))))
        for size in (size for size in ALONE if LETTER * size * longest <= WIDTH):
            fits = lines_of(sentence, size) <= room
            if fits and TITLE + lines_of(sentence, size, NARROW) - GAP >= HALF:
                return size
    return next((size for size in SIZES if lines_of(sentence, size) <= room), SIZES[-1])


def lines_of(sentence, size, letter=LETTER):
    """The height of a sentence whose letters are `size` high, with the gap below it."""
    width = letter * size * len(words_of(sentence))
    return GAP + LINE * size * math.ceil(width / WIDTH)


def words_of(sentence):
    return re.sub(r"<[^>]*>|[*`]", "", sentence)


def height_of(sentence, size, figure):
    return lines_of(sentence, size) + figure


def height_of_figure(figure):
    """The height of the HTML of a figure, 0 for None."""
    if not figure:
        return 0
    if drawn := re.search(r"<svg[^>]* height=\"(\d+)\"", figure):
        return int(drawn[1]) + (52 if "<figcaption>" in figure else 6)
    if printed := re.search(r"<pre[^>]*font-size:([\d.]+)px", figure):
        return 16 + 1.3 * float(printed[1]) * (1 + figure.count("\n"))
    if "<table" in figure:
        return 20 + 46 * figure.count("<tr")
    return 150  # a formula
