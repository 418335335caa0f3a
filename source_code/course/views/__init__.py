# SPDX-License-Identifier: Apache-2.0
"""Interactive views of a timeline: the explorer, and the controls that step through time."""
