"""The GPU that is not there: a CUDA device of PyTorch whose kernels do nothing and whose memory is not touched."""
