"""The Gymnasium environment over an engine."""
