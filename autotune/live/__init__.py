"""Attach to somebody's own training loop: watch it, advise it, and switch its plan without ever harming it."""
