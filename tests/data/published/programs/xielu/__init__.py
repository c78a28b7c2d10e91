"""Of nickjbrowning/XIELU, which needs CUDA to be built, as much as transformers' xIELU asks for."""
