"""Tests of `graph.host.driver`."""
