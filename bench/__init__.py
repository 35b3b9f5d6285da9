"""The measurements behind the published figures: each prints a table with bounds beside it."""
