"""Tests of `simulator.commands`."""
