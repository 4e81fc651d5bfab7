"""Reproduction of the paper's experiments: its numbers, our measurements, and their ratio."""
