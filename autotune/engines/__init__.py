"""What turns a plan into a measurement."""
