"""The training engine: Megatron-Core models under 5D parallelism, on GPUs or, unchanged, on CPUs."""
