"""Sequences, scheduling, sampling, and the model that a user holds (DESIGN.md §5)."""
