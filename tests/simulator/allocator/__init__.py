"""Tests of `simulator.allocator`."""
