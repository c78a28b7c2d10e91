"""Tests of `graph.fake_cuda`."""
