"""Stand between a framework's training loop and a live tuner: each framework is imported in one file, its own."""
