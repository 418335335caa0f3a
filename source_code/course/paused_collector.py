# SPDX-License-Identifier: Apache-2.0
"""Lets the fork server import without garbage collections, which take a fifth of its time.

The server imports this module first, and frozen_imports.py, which ends the pause, last.
"""

import gc

gc.disable()
