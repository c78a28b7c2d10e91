"""Tests of `simulator.comparison`."""
