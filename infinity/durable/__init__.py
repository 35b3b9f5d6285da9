"""Commits of steps: the state that a durable run keeps on NVMe, from which it resumes after a crash."""
