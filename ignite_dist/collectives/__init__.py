"""What a collective does with a value, over the tensor primitives of a computation model."""
