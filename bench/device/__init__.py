"""Copies between host and device, and training on a GPU."""
