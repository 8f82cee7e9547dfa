"""Finds hangs: the watchdog, the flight recorder, the out-of-band store and the end of each context."""
