"""PyTorch's own distributed methods, run as one rank of a job."""
