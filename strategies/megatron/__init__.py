"""Tensor parallelism in the manner of Megatron."""
