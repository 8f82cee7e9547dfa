"""Collectives over memory that the ranks of one machine share, beside any backend."""
