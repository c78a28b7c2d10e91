"""Tests of `graph.loop`."""
