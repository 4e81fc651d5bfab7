"""Simulated training jobs under moving conditions: what the shipped policy is trained on."""
