"""The measurements behind the numbers: each prints a table with its bounds beside it."""
