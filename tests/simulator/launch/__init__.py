"""Tests of `simulator.launch`."""
