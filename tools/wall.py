"""Show how far a room has come: a page for the projector that follows the folder of progress.

    make wall FOLDER=/shared/progress
    python tools/wall.py FOLDER [--names]

Open build/wall/wall.html in a browser. This program rewrites a file next to the page whenever the
folder changes, and the page reads that file twice a second; it needs no server. Names are shown
only with --names.
"""

import json
import os
import sys
import time
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from exercises import all_exercises  # noqa: E402

from course.progress import REACHED, RIGHT, TRIED, read_progress  # noqa: E402
from files.outputs import write_whole  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from guard.paths import check_apart  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402

WALL = ROOT / "build" / "wall"
EVERY = 0.5  # seconds
MANY_ATTEMPTS = 3  # wrong answers in a row after which a person counts as stuck
LONG = 8 * 60  # seconds since the first wrong answer after which a person counts as stuck
GONE = 30 * 60  # seconds without a check after which a person is no longer in the room


class Place(NamedTuple):
    """Where a person is: the latest exercise, its latest result, and since when."""

    person: str
    exercise: str
    outcome: str
    attempts: int  # wrong ones at this exercise, since it was last right
    since: float  # seconds since the first of them, or since the last check if there is none
    last: float  # seconds since the last check
    stuck: bool


class Count(NamedTuple):
    """The results of a room in one exercise: the number of people by their best result.

    `stuck` of them are stuck there now. `attempts` is the mean per person with an attempt.
    """

    exercise: str
    reached: int
    tried: int
    right: int
    stuck: int
    attempts: float


@in_one_sentence()
def main():
    arguments = parse_arguments()
    if not os.path.isdir(arguments.folder):
        sys.exit(
            f"wall.py: {arguments.folder} is not a folder; name the one with everybody's progress"
        )
    wall = Path(arguments.into)
    check_apart("--into", wall, "FOLDER", arguments.folder)
    titles = titles_of_exercises()
    with naming_files(fix="mend that, or name another folder"), suppress(KeyboardInterrupt):
        wall.mkdir(parents=True, exist_ok=True)
        write_whole(wall / "wall.html", PAGE)
        write_whole(wall / "wall.js", SCRIPT)
        print(f"Open {os.path.relpath(wall)}/wall.html; Ctrl+C ends this.", flush=True)
        while True:
            follow(arguments.folder, wall, titles, arguments.names)
            time.sleep(EVERY)
    return 0


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument(
        "folder", metavar="FOLDER", help="where COURSE_PROGRESS points for everybody"
    )
    parser.add_argument("--names", action="store_true", help="show names, not numbers")
    parser.add_argument("--into", default=WALL, metavar="FOLDER", help="the folder of the page")
    return parser.parse_args()


def titles_of_exercises():
    """{name of a check: lesson and title of its exercise}, in the order of the course."""
    return {
        one.name: f"{one.lesson} {one.name if one.name[-1].isdigit() else one.title}"
        for one in all_exercises()  # "puzzle 5" says enough
    }


def follow(folder, wall, titles, names):
    """Read the folder once, and write the data of the page into the folder `wall`."""
    people, skipped = read_progress(folder)
    shown = wall_of(with_known(people, titles), skipped, titles, names, time.time())
    # Written whole, so that the page never reads half a file.
    write_whole(wall / "wall_data.js", f"show({json.dumps(shown)});\n")


def with_known(people, titles):
    """The same people with their records of the course's exercises; anybody may write others."""
    known = {
        person: [record for record in records if record["exercise"] in titles]
        for person, records in people.items()
    }
    return {person: records for person, records in known.items() if records}


def place_of(person, records, now):
    last = records[-1]
    wrong = []
    for record in records:
        if record["exercise"] == last["exercise"]:
            wrong = [] if record["outcome"] == RIGHT else wrong
            wrong += [record] if record["outcome"] == TRIED else []
    now = max(now, last["time"])  # that person's clock may be ahead of this one
    since = now - (wrong or [last])[0]["time"]
    stuck = last["outcome"] == TRIED and (len(wrong) >= MANY_ATTEMPTS or since >= LONG)
    return Place(
        person, last["exercise"], last["outcome"], len(wrong), since, now - last["time"], stuck
    )


def counts_of(people, places, titles):
    """A Count for every exercise that somebody has reached, in the order of the course."""
    best, attempts = {}, {}
    for person, records in people.items():
        for record in records:
            key = record["exercise"], person
            order = [REACHED, TRIED, RIGHT]
            best[key] = max(best.get(key, REACHED), record["outcome"], key=order.index)
            attempts[key] = attempts.get(key, 0) + (record["outcome"] != REACHED)
    order = {name: number for number, name in enumerate(titles)}
    names = sorted({name for name, _ in best}, key=lambda name: (order.get(name, len(order)), name))
    counts = []
    for name in names:
        outcomes = [outcome for (exercise, _), outcome in best.items() if exercise == name]
        tries = [count for (exercise, _), count in attempts.items() if exercise == name and count]
        stuck = sum(place.stuck for place in places if place.exercise == name)
        numbers = [outcomes.count(outcome) for outcome in (REACHED, TRIED, RIGHT)]
        counts.append(Count(name, *numbers, stuck, sum(tries) / len(tries) if tries else 0.0))
    return counts


def stumbling_block(counts):
    """The Count with the most people stuck, then the most who tried; None if fewer than two."""
    hardest = max(counts, key=lambda count: (count.stuck, count.tried), default=None)
    return hardest if hardest and max(hardest.stuck, hardest.tried) >= 2 else None


def wall_of(people, skipped, titles, names, now):
    """The content of the page, as HTML."""
    everybody = [place_of(person, records, now) for person, records in people.items()]
    places = [place for place in everybody if place.last < GONE]
    counts = counts_of(people, places, titles)
    first = sorted(people, key=lambda person: people[person][0]["time"])
    called = {person: person if names else f"person {i + 1}" for i, person in enumerate(first)}
    stuck = sum(place.stuck for place in places)
    hardest = stumbling_block(counts)
    parts = [f"<h1>{len(places)} at work, {stuck} stuck</h1>"]
    if hardest:
        parts.append(
            f"<p class='hardest'>The room stumbles at <b>{title_of(hardest.exercise, titles)}</b>: "
            f"{hardest.tried} have tried and are not through, {hardest.right} are; "
            f"{hardest.attempts:.1f} attempts on average.</p>"
        )
    parts.append(table_of_counts(counts, titles))
    places.sort(key=lambda place: (not place.stuck, called[place.person]))
    parts.append("<ul>" + "".join(card_of(place, called, titles) for place in places) + "</ul>")
    if skipped:
        listed = "; ".join(escape(sentence) for sentence in skipped[:10])
        more = f"; and {len(skipped) - 10} more" if len(skipped) > 10 else ""
        if not names:  # a file may have the name of a person
            listed, more = f"{len(skipped)} of the folder's files, or lines in them", ""
        parts.append(f"<p class='skipped'>Skipped: {listed}{more}.</p>")
    return "".join(parts)


def table_of_counts(counts, titles):
    rows = "".join(
        f"<tr><th scope='row'>{title_of(count.exercise, titles)}</th>"
        f"<td>{'●' * count.right}{'◐' * count.tried}{'○' * count.reached}</td>"
        f"<td>{count.right}</td><td>{count.tried}</td><td>{count.reached}</td>"
        f"<td>{count.stuck or ''}</td><td>{count.attempts:.1f}</td></tr>"
        for count in counts
    )
    heads = ["exercise", "", "● right", "◐ not yet", "○ reached", "stuck now", "attempts"]
    top = "".join(f"<th scope='col'>{head}</th>" for head in heads)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table>"


def card_of(place, called, titles):
    minutes = f"{place.since / 60:.0f} min"
    said = {REACHED: f"reached {minutes} ago", RIGHT: f"right {minutes} ago"}.get(place.outcome)
    said = said or f"{place.attempts} attempt{'s' * (place.attempts > 1)} in {minutes}"
    mark = "<b>stuck</b>: " if place.stuck else ""
    kind = " class='stuck'" if place.stuck else ""
    return (
        f"<li{kind}><b>{escape(called[place.person])}</b> "
        f"{title_of(place.exercise, titles)}<br>{mark}{said}</li>"
    )


def title_of(exercise, titles):
    return escape(titles[exercise])


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Where the room is</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; connect-src 'none';
 style-src 'unsafe-inline'; script-src 'self' file:">
<style>
:root { color-scheme: light dark; }
body { font: 22px/1.4 system-ui, Helvetica, Arial, sans-serif; margin: 28px 40px; }
h1 { font-size: 40px; margin: 0; } .hardest { font-size: 26px; } .skipped { font-size: 16px; }
table { border-collapse: collapse; } td, th { text-align: left; padding: 4px 22px 4px 0; }
td:nth-child(2) { letter-spacing: 3px; max-width: 30em; overflow-wrap: anywhere; }
ul { list-style: none; padding: 0; display: grid; gap: 10px;
  grid-template-columns: repeat(auto-fill, minmax(15em, 1fr)); }
li { border: 2px solid #8a9299; border-radius: 8px; padding: 8px 14px; }
li.stuck { border: 5px solid #D55E00; }
</style><script defer src="wall.js"></script></head>
<body><p class="skipped" id="clock"></p><main aria-live="polite"><p>Waiting for tools/wall.py ...</p></main></body></html>
"""
SCRIPT = """// Reads wall_data.js twice a second; what it shows comes from tools/wall.py.
let shown = "";
function show(text) {
  if (text !== shown) document.querySelector("main").innerHTML = shown = text;
}
setInterval(() => {
  document.querySelector("#clock").textContent = new Date().toLocaleTimeString();
  const script = document.createElement("script");
  script.src = `wall_data.js?${Date.now()}`;
  script.onload = script.onerror = () => script.remove();
  document.head.append(script);
}, 500);
"""


if __name__ == "__main__":
    sys.exit(main())
