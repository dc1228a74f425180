"""Closed forms: FLOPs, bytes and message sizes, from a config alone. Pure; no torch."""
