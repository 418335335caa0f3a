# SPDX-License-Identifier: Apache-2.0
"""Freezes what the fork server has imported, so that no garbage collection searches it again.

The server imports this module last. A collection in a rank would copy the server's memory, page by
page, and one at the server's end would take half a second.
"""

import gc

gc.freeze()
gc.enable()  # see paused_collector.py
