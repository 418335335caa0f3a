# SPDX-License-Identifier: Apache-2.0
"""Checks of the exercises: one file per lesson, the code that they share, the puzzles as data."""
