"""Processes that agree: groups, what they wait for, and the machine's memory that they share."""
