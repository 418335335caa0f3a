# SPDX-License-Identifier: Apache-2.0
"""Pipelines with one fault each (lesson 12b). Do not read `faults.py` if you want to find them."""
