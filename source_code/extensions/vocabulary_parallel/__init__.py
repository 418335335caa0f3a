# SPDX-License-Identifier: Apache-2.0
"""Embedding and head spread over all ranks of a pipeline, or tied across its two ends."""
