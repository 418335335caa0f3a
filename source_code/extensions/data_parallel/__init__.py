"""Several equal pipelines side by side, which sum their gradients."""
