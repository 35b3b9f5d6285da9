"""Sequences in parts over ranks, and their lengths: Ulysses' attention, split batches, a warm-up."""
