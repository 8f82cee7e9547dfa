"""Where the time goes: the timeline of calls, on all ranks, by clocks that agree."""
