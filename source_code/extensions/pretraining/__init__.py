# SPDX-License-Identifier: Apache-2.0
"""What a long training run adds to the steps: texts, held-out loss, useful work, a log."""
