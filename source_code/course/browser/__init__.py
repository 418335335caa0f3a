"""The part of the course that runs in a page: see page.py."""
