"""What the other rooms stand on: private names of torch, the user's line of code, checks of arguments, limits."""
