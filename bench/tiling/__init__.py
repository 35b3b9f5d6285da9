"""Operators in tiles: memory and time, beside the whole ones."""
