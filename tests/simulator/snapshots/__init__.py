"""Tests of `simulator.snapshots`."""
