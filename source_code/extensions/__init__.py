# SPDX-License-Identifier: Apache-2.0
"""What a training run adds to the core: other stages, other updates, checkpoints, planning."""
