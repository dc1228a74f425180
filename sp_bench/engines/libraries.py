"""What the libraries that train call our kernels and methods. It imports no library, and no torch."""

ATTENTION = {  # our kernels -> what transformers calls the attention that launches them
    "flash_attn": "flash_attention_2",
    "sdpa_flash": "sdpa",
    "cudnn": "sdpa",
    "cpu_flash": "sdpa",
    "math": "sdpa",  # with its math backend
}
CONTEXT_PARALLEL = "torch_context_parallel"  # the method that hf_fsdp2 has
