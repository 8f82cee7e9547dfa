"""The launcher's side: start workers on one or several nodes, wait for them, and end them."""
