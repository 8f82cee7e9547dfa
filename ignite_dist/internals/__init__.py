"""The ground of the other rooms: private names of torch and Python, call sites, argument checks, limits."""
