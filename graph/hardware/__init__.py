"""GPUs: what the models of kernels and of time need to know of them."""
