"""What starts workers on one or several nodes, waits for them, and ends them."""
