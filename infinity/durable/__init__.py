"""Commits of steps: what a run leaves on NVMe, so that it goes on after a crash."""
