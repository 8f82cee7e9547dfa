"""Worker processes: how they start and end, and what they send. The process that starts them: ``supervisor``."""
