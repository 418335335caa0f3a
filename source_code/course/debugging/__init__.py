# SPDX-License-Identifier: Apache-2.0
"""Analysis of recordings: what ranks waited for, where two runs first differ, the time machine."""
