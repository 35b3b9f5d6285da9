"""Whole training steps: time, bytes, memory and losses, beside peers and limits."""
