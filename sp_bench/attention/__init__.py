"""The shared parts of our sequence-parallel methods. Each part is written once, and `sp_bench/methods` composes them.

layouts        which token lives on which rank: index maths, no torch
exchange       messages between ranks, carried by the process group's collectives
copy_engines   the same messages, carried by a GPU's copy engines
head_exchange  the all-to-alls between "my tokens of all heads" and "all tokens of my heads"
head_chunks    Ulysses attention, in chunks of heads
ring           Ring Attention
gather         KV all-gather attention
keys           keys and values as one tensor
latent         latents, of which keys and values are projected up
merge          combines attention over parts of the keys by log-sum-exp
autograd       makes a forward and a backward one differentiable function
"""
