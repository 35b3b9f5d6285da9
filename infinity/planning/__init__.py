"""Decides, in pure Python: layouts, budgets, plans, residence, the order of passes, placement, forecasts.
Imports neither torch nor cffi.
"""
