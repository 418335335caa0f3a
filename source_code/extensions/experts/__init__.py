# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers whose experts are spread over the replicas of a pipeline."""
