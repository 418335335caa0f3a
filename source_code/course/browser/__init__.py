# SPDX-License-Identifier: Apache-2.0
"""The part of the course that runs in a web page; page.py receives the page's requests."""
