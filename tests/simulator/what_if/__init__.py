"""Tests of `simulator.what_if`."""
