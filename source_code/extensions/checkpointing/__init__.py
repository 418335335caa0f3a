# SPDX-License-Identifier: Apache-2.0
"""Saving a training run that lies on many ranks, and continuing it on as many or on others."""
