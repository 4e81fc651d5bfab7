"""Gymnasium environments of real and simulated jobs."""
