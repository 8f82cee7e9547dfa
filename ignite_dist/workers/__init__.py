"""Worker processes: how they start and end, and what they send. The launcher's side is in ``launching``."""
