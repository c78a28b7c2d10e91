"""Tests of `strategies`."""
