"""Timing, counting and recording of one step."""
