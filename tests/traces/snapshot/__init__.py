"""Tests of `traces.snapshot`."""
