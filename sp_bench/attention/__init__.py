"""Attention over several ranks: which token lives where, what is exchanged, and its gradient. Each part once."""
