"""Engines, which run a job under a plan and return a measurement."""
