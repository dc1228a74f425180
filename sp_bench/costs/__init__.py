"""Closed forms: what a trial costs, computed from its config alone. Pure functions, no torch.

attention      FLOPs of attention, and bytes of each communication pattern
patterns       which pattern a library's method has, and what the library sends in addition
training       parameters, FLOPs and bytes of a training step
work           calls of the attention kernel, and what a counted step must have computed
message_sizes  sizes of the collective workload, and the line through its times
flags          doubts about an ok row's times, from its columns
"""
