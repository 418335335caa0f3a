"""Folders of tokens for tests, as prepare_data.py makes them."""

import sys
from unittest import mock

import prepare_data

from pipeline.data import DEFAULT_TEXT


def prepare(folder, *words, data=DEFAULT_TEXT):
    """Make tokens of the course's own text, or of `data`, in the new `folder`; return the folder."""
    texts = ["--data", str(data)] if data else []
    with mock.patch.object(
        sys, "argv", ["prepare_data.py", "--out", str(folder), *texts, *map(str, words)]
    ):
        assert prepare_data.main() == 0
    return folder
