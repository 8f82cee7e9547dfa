"""Which computation model is live in this process, and what it says about it."""
