# SPDX-License-Identifier: Apache-2.0
"""What a run can add to the core: other stages, other updates, checkpoints, saved models."""
