"""Worker processes: start, end, failures, and the launchers of jobs on several nodes."""
