# SPDX-License-Identifier: Apache-2.0
"""The guard: surrounds a program's main() and keeps its user from harm."""
