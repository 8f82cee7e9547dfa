"""Data loaders that split a data set over the ranks, and a gather of results in data set order."""
