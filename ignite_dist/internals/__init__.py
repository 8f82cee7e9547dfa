"""The ground of the other rooms: private names of torch, call sites, checks of arguments, limits."""
