"""Tests of `graph.recorder`."""
