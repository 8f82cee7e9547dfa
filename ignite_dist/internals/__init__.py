"""The ground of the other rooms: private names of torch and of Python, call sites, checks of arguments, limits."""
