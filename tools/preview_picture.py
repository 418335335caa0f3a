"""The picture that a chat or a search shows beside a link to the website: images/preview.png.

Such previews show no SVG. It is GPipe above 1F1B, as in schedule_pictures.py, with larger letters.
"""

from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from schedule_map import same_work

from lab.drawing import FILL
from lab.held_curve import HELD, fullest_rank, held_over_time

SIZE = 1200, 630  # pixels, which previews expect
LEFT, WIDTH, ROW, GAP = 60, 880, 30, 5
UNIT = 8  # pixels of memory for a micro-batch


def preview():
    """The picture as a PIL Image."""
    image = Image.new("RGB", SIZE, "#ffffff")
    draw = ImageDraw.Draw(image)
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    large, small = (ImageFont.truetype(fonts / "DejaVuSans-Bold.ttf", size) for size in (42, 28))
    draw.text((LEFT, 26), "Pipeline parallelism in PyTorch", "#1a1a1a", large)
    draw.text((LEFT, 82), "equal bubble, less memory", "#0b5c8a", small)
    for top, name, words in ((136, "gpipe", "GPipe"), (386, "1f1b", "1F1B")):
        timeline = same_work(name, 4, 8)
        scale = WIDTH / timeline.makespan
        for rank, events in enumerate(timeline.by_rank):
            y = top + rank * (ROW + GAP)
            draw.rectangle((LEFT, y, LEFT + WIDTH, y + ROW), "#dddddd")
            for event in events:
                span = (LEFT + event.start * scale, y, LEFT + event.end * scale - 2, y + ROW)
                draw.rectangle(span, FILL[event.action.kind])
        rank, peak = fullest_rank(timeline)
        bottom = top + 4 * (ROW + GAP) + 8 * UNIT + 4
        steps = [*held_over_time(timeline, rank), (timeline.makespan, 0)]
        for (start, held), (end, _) in zip(steps, steps[1:]):
            if end > start and held:
                span = (LEFT + start * scale, bottom - held * UNIT, LEFT + end * scale, bottom)
                draw.rectangle(span, HELD)
        draw.text((LEFT + WIDTH + 30, top + 20), words, "#1a1a1a", large)
        draw.text((LEFT + WIDTH + 30, bottom - 40), f"{peak:g} held", HELD, large)
    return image
