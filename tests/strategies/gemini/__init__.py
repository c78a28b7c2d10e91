"""Tests of `strategies.gemini`."""
