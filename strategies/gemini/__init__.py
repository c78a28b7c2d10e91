"""Colossal-AI's Gemini, as LLMem ran it: chunks, their moves, tensor parallelism, the paper's equations."""
