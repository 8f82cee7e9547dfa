"""Values without communication: trees, operations over ranks, bytes."""
