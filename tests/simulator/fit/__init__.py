"""Tests of `simulator.fit`."""
