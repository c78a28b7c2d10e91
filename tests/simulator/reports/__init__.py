"""Tests of `simulator.reports`."""
