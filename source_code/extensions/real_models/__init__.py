# SPDX-License-Identifier: Apache-2.0
"""Models as Hugging Face's libraries save them: read by the ranks of a pipeline, and written."""
