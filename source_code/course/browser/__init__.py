"""The part of the course that runs in a web page; page.py receives the page's requests."""
