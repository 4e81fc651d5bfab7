"""Predict a step's time and memory from a profile, and find the best plan: pure functions that know no torch."""
