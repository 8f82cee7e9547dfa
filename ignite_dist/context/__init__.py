"""The live context of this process: its start, its end and its getters."""
