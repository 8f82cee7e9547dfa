"""The public collectives, built on the tensor primitives of a transport."""
