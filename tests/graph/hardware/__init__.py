"""Tests of `graph.hardware`."""
