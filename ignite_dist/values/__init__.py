"""Values and their encoding, without communication: trees, reductions, bytes."""
