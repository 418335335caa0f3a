# SPDX-License-Identifier: Apache-2.0
"""What a long training run adds to an update: a changing rate, clipping, weights in 16 bits."""
