# SPDX-License-Identifier: Apache-2.0
"""Pipelines without a flush: an update after each backward, with several versions of weights."""
