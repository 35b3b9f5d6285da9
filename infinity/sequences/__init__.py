"""Sequences in parts over ranks, and which of their tokens are computed: Ulysses, a warm-up, random-LTD."""
