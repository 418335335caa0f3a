"""Mixture-of-experts layers whose experts are spread over the replicas of a pipeline."""
