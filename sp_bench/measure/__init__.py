"""How a step is measured.

timing         warm-up, timed steps, memory
ledger         bytes counted from the collectives that a step issues
counters       what the device itself counts: energy, NVLink bytes, clocks
cuda_graph     a step replayed as a CUDA graph
record         one record from all ranks' samples, and what the trial ran on
incorrect      the exception that ends a trial as `incorrect`
"""
