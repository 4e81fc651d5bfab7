"""How many hostile inputs the long tests try."""

import os

# `make fuzz` tries ten times as many as continuous integration has time for.
EFFORT = float(os.environ.get("FUZZ_EFFORT", "0.1"))
