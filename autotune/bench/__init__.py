"""The benchmarks of the project itself: one file for each ``autotune bench`` verb, and what they measure with."""
