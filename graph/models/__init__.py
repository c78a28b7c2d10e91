"""Models without weights: the catalogue, configurations, a user's function; adapters and quantization."""
