"""How long sequences may be within a budget."""
