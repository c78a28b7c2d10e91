"""Tests of `simulator.integrations`."""
