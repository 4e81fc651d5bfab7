"""Predictions of a step's time and memory from a profile, and solvers for the best plan; independent of torch."""
