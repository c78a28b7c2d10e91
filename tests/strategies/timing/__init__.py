"""Tests of `strategies.timing`."""
