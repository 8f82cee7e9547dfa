"""Checkpoints: what they contain, their files, and how they are loaded on other numbers of ranks."""
