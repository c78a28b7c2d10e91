"""Tests of `graph.models`."""
