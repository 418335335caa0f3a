# SPDX-License-Identifier: Apache-2.0
"""Planning before a run: cut of the model, parallelism, time and memory, shortest schedule."""
