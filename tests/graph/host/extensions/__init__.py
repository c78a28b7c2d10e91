"""Tests of `graph.host.extensions`."""
