"""Predictions for training runs of transformers on many devices, from their shapes alone; nothing is measured here."""
