"""The website's pages that the repository does not have: the first, the puzzles, a page not found.

The first page is Markdown with links from the root of the repository, as in README.md.
"""

import re
from pathlib import Path

import nbformat

PACK = Path("docs/instructors.md")
PUZZLE_LESSON = Path("notebooks/12_your_own_schedule.ipynb")
EXERCISE = r"\*\*(\d+)\. .*?\*\*"

EXPLORER_PAGE = "<h1>The explorer</h1>"
ABOUT_EXPLORER = """<p>Choose a schedule and what it costs. The course's simulator, in Python, runs in this page: it
predicts what every rank does, and says why. Costs are those of all layers of one rank, so that the
model stays the same when a rank has several stages. Below the timelines you see how many
micro-batches the fullest rank holds. Under "costs and memory" you see whether the memory of each rank
suffices, and two curves: time and memory against the slider that you moved last. The address
of the page always leads back to what you see.</p>"""


INDEX_PAGE = """# Pipeline parallelism: predict, perform, compare

A model that is too large for one GPU is cut into stages, one per GPU. The schedule decides how long
the GPUs wait for each other, and how much memory each of them needs. This course teaches the
schedules in PyTorch: a simulator predicts them, real processes perform them, and you compare.

{doors}

{row}![GPipe above 1F1B on four ranks: both take 330 ms, and each rank is idle 27.3 % of it; rank 0 holds eight micro-batches with GPipe, four with 1F1B.](images/gpipe-above-1f1b.svg)

**Equal bubble, less memory.** Each row is a rank, each box works on one micro-batch, and grey is
waiting. It is often said that 1F1B waits less than GPipe. Both wait equally long. What 1F1B saves is
memory, and [lesson 03](notebooks/03_1f1b.ipynb) shows why.

## The course

- **90 minutes**: [what a pipeline is](notebooks/00_start_here.ipynb), [why three of four ranks
  wait](notebooks/01_naive_model_parallelism.ipynb), [and what GPipe does about
  it](notebooks/02_gpipe.ipynb).
- **A day, or the whole course**: [all lessons with their minutes, and three routes](docs/lessons.md).
- **On your machine**: [three commands](README.md#ways-in) open the lessons in JupyterLab, where
  real processes perform what you write.

## The map of the schedules

![{map_alt}](images/map-of-schedules.svg)

Further left is less memory, further down is less waiting. Blue schedules have whole backwards,
orange ones split them. [All schedules on one page](images/README.md).

## Take it to work

{copy}- [All scripts](source_code/README.md), from a pipeline of 150 lines to the pretraining of a Llama,
  and a planner that forecasts the fastest layout.
- [Errors of torch.distributed.pipelining](docs/torch-distributed-pipelining-errors.md), with causes.
- {teach}[Glossary](docs/glossary.md), [about the course](README.md).
"""

COPY = """- [One file of 300 lines](source_code/small/pipeline.py) needs torch and nothing else. [Put in your
  own model and data](docs/your-own-model.md#one-file).
"""
DOORS = """<div class="doors">
<a href="explorer.md"><b>Play: the explorer</b>Choose a schedule, move a slider, and see who waits.</a>
<a href="puzzles.md#puzzle-1"><b>Play: puzzle 1</b>Put the work of two GPUs in order.
Eleven puzzles.</a>
<a href="notebooks/00_start_here.ipynb"><b>Read: lesson 00</b>Four processes train one model. Begin here.</a></div>"""
READ = """<div class="doors">
<a href="notebooks/00_start_here.ipynb"><b>Read: lesson 00</b>Four processes train one model. Begin here.</a>
<a href="images/README.md"><b>Look: all schedules</b>Every schedule, predicted and performed.</a></div>"""

PUZZLES_PAGE = """# The puzzles

Each puzzle gives you ranks, micro-batches, the room for activations, and a target. Tap the actions
of each rank into an order. After each tap you see what would run, and when the order is
complete, the course's own check answers.
A forward (F) of a micro-batch goes through the stages upwards, its backward (B) downwards. `0F3` is
the forward of micro-batch 3 on stage 0. I and W are the two halves of a split backward. The puzzles
are the exercises of [lesson 12](notebooks/12_your_own_schedule.ipynb)."""

NOT_FOUND = """<h1>This page is not there</h1><p>The address may be misspelt, or the page has moved.
<a href="index.html">The first page of the course</a> leads to all others.</p>"""


def index_of(lives, map_alt, teaches, slides, row):
    """The first page in Markdown.

    `lives`: its site has the explorer and the puzzles. `teaches`: it has the instructors' pack, and
    the text of the answers; a handout has neither. `row`: the links of make_hosted.py to lesson 00,
    a paragraph or "".
    """
    shown = " with [the slides of every lesson](slides/index.html)" if slides else ""
    return INDEX_PAGE.format(
        doors=DOORS if lives else READ,
        row=row,
        map_alt=map_alt,
        copy=COPY if teaches else "",
        teach=f"[Teach it]({PACK}){shown}. " if teaches else "",
    )


def puzzles_of(cells):
    """The cells of the page of puzzles, from those of their lesson: each puzzle's text and stub."""
    shown = [nbformat.v4.new_markdown_cell(PUZZLES_PAGE)]
    for index, cell in enumerate(cells):
        if not re.search(r"^check\.puzzle\(", cell.source, re.M):
            continue
        text = cells[index - 2].source
        text = text[re.search(EXERCISE, text).start() :]
        number = re.match(EXERCISE, text)[1]
        text = re.sub(r"\*\*(\d+)\. (.*?)\*\*( \([^)]*\)\.)?\s*", r"## \1. \2\n\n", text, count=1)
        shown.append(nbformat.v4.new_markdown_cell(f'<a id="puzzle-{number}"></a>\n\n{text}'))
        shown += cells[index - 1 : index + 1]
    return shown
