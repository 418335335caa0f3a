# SPDX-License-Identifier: Apache-2.0
"""The core: a job of ranks, stages of a model, schedules as data, and a worker that performs them."""
