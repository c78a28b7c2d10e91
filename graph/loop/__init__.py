"""The loops that a captured model runs in: training, generation, what goes in and how the loss comes about."""
