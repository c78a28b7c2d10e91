"""Tests of `strategies.parallel`."""
