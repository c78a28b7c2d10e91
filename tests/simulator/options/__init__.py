"""Tests of `simulator.options`."""
