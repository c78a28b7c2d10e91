"""Tests of `simulator.explain`."""
