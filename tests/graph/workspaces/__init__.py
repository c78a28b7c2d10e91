"""Tests of `graph.workspaces`."""
