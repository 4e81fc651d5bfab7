"""Whole commands: run directories, tracking, tuning, comparing."""
