"""What proves a method or a training step right before it is timed.

reduced_length  output and gradients of a method, whole, at a reduced length
timed_length    the same at the timed length, on a sample of rows
one_process     the same training on one process
"""
