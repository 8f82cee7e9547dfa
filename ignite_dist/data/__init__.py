"""Data loaders that share a data set out over the ranks, and what brings results back into its order."""
