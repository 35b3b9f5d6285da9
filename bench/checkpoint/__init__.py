"""Checkpoints: the seconds and the memory that they take."""
