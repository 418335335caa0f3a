# SPDX-License-Identifier: Apache-2.0
"""Several equal pipelines side by side, which sum their gradients."""
