"""Steps of tuning, comparing and training."""
