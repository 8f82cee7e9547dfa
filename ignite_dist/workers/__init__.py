"""Worker processes: how they start and end, and what they send. ``supervisor`` starts them."""
