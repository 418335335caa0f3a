"""The bytes that a rank needs, predicted and counted, and the recomputation that needs fewer."""
