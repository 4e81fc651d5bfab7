"""The project's own benchmarks: one module per ``autotune bench`` subcommand, and shared tools."""
