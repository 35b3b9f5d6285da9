"""Time and memory of checkpoints."""
