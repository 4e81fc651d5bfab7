"""Measure what the pieces of a job cost, and which of its units may be recomputed."""
