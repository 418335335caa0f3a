# SPDX-License-Identifier: Apache-2.0
"""The guard checks flags and files before a run, and names a rank that is lost during the run."""
