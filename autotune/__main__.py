"""Run the command line as ``python -m autotune``."""

from autotune.cli.main import main

main()
