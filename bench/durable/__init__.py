"""Durable runs: what committing steps costs."""
