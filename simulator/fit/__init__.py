"""The cheapest changes that make a run fit: `llmem fit`, and what other commands say of a run that does not fit."""
