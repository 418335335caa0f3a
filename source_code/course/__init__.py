# SPDX-License-Identifier: Apache-2.0
"""The functions that notebooks call: they start ranks, show a script's code, reach a cluster."""
