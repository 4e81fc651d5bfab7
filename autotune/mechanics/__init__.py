"""What a plan does to a model and a step, in torch."""
