"""PyTorch's CUDA caching allocator, compiled."""
