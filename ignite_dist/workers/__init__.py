"""Worker processes: starting and ending them, launchers of several machines, what a worker died of."""
