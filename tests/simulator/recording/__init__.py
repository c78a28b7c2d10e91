"""Tests of `simulator.recording`."""
