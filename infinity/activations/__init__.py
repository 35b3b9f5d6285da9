"""Saved inputs of checkpoints, offloaded, or in parts over ranks."""
