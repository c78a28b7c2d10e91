"""What comes with NVIDIA's driver, which is not here: its management library (`nvml`) and `nvidia-smi` (`smi`)."""
