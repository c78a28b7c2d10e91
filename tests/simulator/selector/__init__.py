"""Tests of `simulator.selector`."""
