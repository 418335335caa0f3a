"""Models as Hugging Face's libraries save them: read by the ranks of a pipeline, and written."""
