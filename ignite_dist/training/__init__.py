"""Training loop utilities: gradient averaging, uneven inputs, state dicts, seeds."""
