"""What proves a method or a training step right before it is timed.

reduced_length  output and gradients of a method, whole, at a reduced length
timed_length    the same at the timed length, on a sample of rows
identities      what the gradients of all rows add up to, at any length
training_step   a whole training step: losses, each parameter's gradient, clipping and update
timed_step      whole training steps at the timed length
one_process     the same training on one process
update          what an optimizer makes of a gradient, by its formula
"""
