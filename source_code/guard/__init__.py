# SPDX-License-Identifier: Apache-2.0
"""The guard: checks what a program is given, and ends it with one sentence if a rank is lost."""
