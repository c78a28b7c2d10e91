"""Tests of `graph.host`."""
