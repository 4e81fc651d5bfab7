"""Repeat the paper's experiments: its numbers, the same measured here, and the ratio."""
