"""Decides, in pure Python: layouts, budgets, plans, placement, forecasts. Imports neither torch nor cffi."""
