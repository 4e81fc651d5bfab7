"""Measurement of what the pieces of a job cost, and of which units may be recomputed."""
