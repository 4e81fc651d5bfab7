"""Simulated training jobs under moving conditions, on which the shipped policy is trained."""
