"""What starts a chosen method: the training script and configuration files."""
