# SPDX-License-Identifier: Apache-2.0
"""Answers the requests of a page of the website: JSON in, JSON out.

The worker of a page (tools/browser/worker.js) calls `answer`. Nothing here needs a browser, so the
tests compare what a page shows with the result of the same call outside the browser.
"""

import json

from course.browser.exercise_page import check, solve
from course.browser.explorer_page import explore, memory_and_time, moment, point

ASKED = {
    "explore": explore,
    "memory_and_time": memory_and_time,
    "moment": moment,
    "point": point,
    "check": check,
    "solve": solve,
}


def answer(request):
    """Answer a request `{"do": NAME, ...}`: a key of ASKED with arguments. Both are JSON text."""
    arguments = json.loads(request)
    return json.dumps(ASKED[arguments.pop("do")](**arguments))
