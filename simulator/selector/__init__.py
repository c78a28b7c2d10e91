"""Which method and micro-batch: candidates, the largest batch of each, their order."""
