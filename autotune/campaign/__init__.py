"""Steps of a tuning, a comparison and a training."""
