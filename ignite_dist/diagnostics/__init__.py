"""Why nothing goes on: the watchdog, the store beside the collectives, the end of the ranks."""
