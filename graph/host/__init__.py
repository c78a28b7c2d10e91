"""What a recorded program meets besides the GPU: the memory of the host, files of weights, extensions, compilers."""
