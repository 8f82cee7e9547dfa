"""What every layer uses: private names of torch and Python, call sites, argument checks, limits."""
