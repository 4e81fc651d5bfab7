"""Torch mechanics of a plan: control of models and steps, and their measurement."""
