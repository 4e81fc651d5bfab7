"""Tuning of a user's own training loop while it runs: profiling it and switching plans without harming it."""
