"""How a tuning, a comparison and a training go, step by step: what the commands are made of."""
