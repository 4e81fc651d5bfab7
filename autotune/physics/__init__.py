"""Formulas: pure functions that know numbers and nothing else."""
