"""What transformers 4.29 did otherwise, for runs of that time."""
